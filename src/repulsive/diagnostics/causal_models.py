"""Train a causal language model of transformers, and compute its perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import call
from repulsive.terminal.progress import Progress as Bar
from repulsive.terminal.progress import no_progress


def is_causal(model: Any) -> bool:
    """Check whether a transformers model is a causal language model, by the name of its class."""
    return not getattr(model.config, "is_encoder_decoder", False) and type(model).__name__.endswith(
        ("ForCausalLM", "LMHeadModel")
    )


def causal_labels(batch: dict[str, Any]) -> Tensor:
    """Return the tokens of a batch as labels, with padding replaced by -100, which the loss ignores."""
    labels: Tensor = batch["input_ids"].clone()
    return labels.masked_fill(batch["attention_mask"] == 0, -100) if "attention_mask" in batch else labels


@torch.no_grad()
def perplexity(model: nn.Module, batches: Sequence[dict[str, Any]]) -> float:
    """Compute the perplexity per token of a causal language model, without padding."""
    total, tokens = 0.0, 0
    for batch in batches:
        labels = causal_labels(batch)
        count = int((labels[:, 1:] != -100).sum())
        total += float(call(model, batch | {"labels": labels}).loss) * count
        tokens += count
    return float(torch.tensor(total / max(tokens, 1), dtype=torch.float32, device="cpu").exp())


def train_causal(
    model: nn.Module,
    batches: Sequence[dict[str, Any]],
    steps: int,
    learning_rate: float,
    seed: int = 0,
    bar: Bar = no_progress,
) -> None:
    """Train a causal language model on the batches with AdamW, and leave it in evaluation mode."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model.train()
    for step in range(steps):
        bar("training step", step, steps)
        batch = batches[step % len(batches)]
        call(model, batch | {"labels": causal_labels(batch)}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()

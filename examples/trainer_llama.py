"""Repulsion in the Trainer of transformers: a small Llama with grouped key-value heads learns to copy.

    python examples/trainer_llama.py

A sequence is some tokens, a separator, and the same tokens again. The loss covers only the second half, which can be
predicted by attending to the first. The script trains once plainly and once with repulsion, and prints the loss and the
mean cosine between heads before and after. Needs `pip install -e '.[transformers,accelerate]'`; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from repulsive import SVGD, find_heads
from repulsive.integrations.transformers import RepulsiveCallback

TOKENS, LENGTH = 16, 6
# Three times the default ratio of 0.01: heads then spread within the few steps of an example.
RULES = {"plain": None, "repulsive": SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0)}


def copies(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(1, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([words, torch.zeros(count, 1, dtype=torch.long), words], dim=1)  # [N, T]; 0 is the separator
    labels = ids.clone()
    labels[:, : LENGTH + 1] = -100  # the first half is random
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def mean_cosine(model: nn.Module) -> float:
    """Mean cosine between two different heads, over all groups."""
    values = []
    for group in find_heads(model):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        values.append((unit @ unit.T)[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    for name, rule in RULES.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        before = mean_cosine(model)
        callback = RepulsiveCallback(rule, measure_every=10, verbose=rule is not None)
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=32,
                learning_rate=5e-3,
                logging_steps=steps // 3,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            trainer = Trainer(model, args, train_dataset=copies(1024, seed=1), callbacks=[callback])
            trainer.train()
            loss = trainer.evaluate(copies(256, seed=2))["eval_loss"]
        print(f"{name}: loss {loss:.3f}, mean cosine between heads {before:.3f} -> {mean_cosine(model):.3f}")
        for group in callback.handle.report():
            print(f"  {group.name:28} ratio {group.ratio:5.3f}  distance {group.distance:6.3f}  at step {group.step}")


if __name__ == "__main__":
    main()

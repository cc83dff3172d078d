"""Prune a model and write it as an ordinary checkpoint, with a list of removed heads and measurements."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.loading.model import LoadedModel
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.output_change import OutputChange, label_free_loss
from repulsive.diagnostics.portable_pruning import Selection, check_portable, prune_portably, select_heads
from repulsive.diagnostics.redundancy import Head
from repulsive.errors import DataError, RunError, SelectionError, UnsupportedWeights
from repulsive.safety.folders import check_creatable, replacing
from repulsive.safety.markdown import format_table
from repulsive.terminal.progress import Progress as Bar
from repulsive.terminal.progress import no_progress
from repulsive.terminal.table import Table, three_digits

BORDER = 2  # heads on each side of the cut that are ranked by exact ablation
_RUNS = 5  # timed forward passes, after one that is not timed
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """Size, speed and quality of one model, measured on the text.

    Args:
        parameters: number of parameters.
        cache_bytes: bytes of cached keys and values per token and sequence; 0 for models without a cache.
        milliseconds: median time of a forward pass over the first batch.
        fastest: shortest of these times.
        slowest: longest of these times.
        perplexity: perplexity per token of a causal language model; None for other models.
        change: change of the output against the whole model: KL divergence in nats, or relative change of states.
    """

    parameters: int
    cache_bytes: int
    milliseconds: float
    fastest: float
    slowest: float
    perplexity: float | None
    change: float


@dataclass(frozen=True)
class Pruned:
    """A pruned model and its measurements.

    Args:
        model: the pruned model.
        selection: the heads that stay.
        layers: names of the attention layers.
        measured: "whole", "ablated", "pruned", and "recovered" after training.
        is_held_out: quality was measured on text that was used neither to score heads nor to train.
        recover: number of training steps.
    """

    model: nn.Module
    selection: Selection
    layers: tuple[str, ...]
    measured: dict[str, Measured]
    is_held_out: bool = False
    recover: int = 0

    @property
    def measured_on(self) -> str:
        """The text that quality was measured on."""
        if self.is_held_out:
            return "held-out text"
        return "the text that heads were scored on" + (" and the model was trained on" if self.recover else "")


def prune_model(
    loaded: LoadedModel,
    batches: Sequence[dict[str, Any]],
    keep: float,
    *,
    test: Sequence[dict[str, Any]] | None = None,
    kv_heads: int | None = None,
    border: int = BORDER,
    recover: int = 0,
    learning_rate: float = 5e-5,
    seed: int = 0,
    progress: Progress = lambda message: None,
    bar: Bar = no_progress,
) -> Pruned:
    """Score the heads of a model, remove the least important ones, and measure the result.

    Args:
        loaded: the model with its tokenizer.
        batches: tokenised text to score heads on, and to train on if `recover` is above 0.
        keep: share of the heads that stay in every layer.
        test: tokenised held-out text to measure on; None measures on `batches`.
        kv_heads: key-value heads that stay in every layer; None: as many as the scores favour.
        border: heads of a layer on each side of the cut that are ranked by exact ablation; 0: gradient scores only.
        recover: optimizer steps of training on `batches` afterwards; causal language models only.
        learning_rate: of that training.
        seed: random seed of the scores.
        progress: called with a line of text at each stage.
        bar: called with a stage, the steps done and their total.

    Raises:
        DataError: there is no text.
        SelectionError: the share cannot be kept, or `recover` needs a causal language model.
        HeadLayoutError: the class cannot be pruned portably; the message gives the reason.
        UnsupportedWeights: the weights are quantised.
    """
    model: Any = loaded.model
    if not batches:
        raise DataError("no text to score heads on; give a file with at least one sentence")
    if test is not None and not test:
        raise DataError("no held-out text to measure on; give a file with at least one sentence")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedWeights(f"{type(model).__name__} is quantised; load it in 16 or 32 bits and prune that")
    if recover and not _is_causal(model):
        raise SelectionError(f"recovery needs a causal language model, {type(model).__name__} is not one; leave it out")
    heads = Heads(model, batches[0])
    check_portable(heads, keep, kv_heads)
    progress(f"scoring {len(heads)} heads")
    selection = select_heads(heads, rank_heads(heads, batches, keep, seed, border, bar), keep, kv_heads)
    measure_on = batches if test is None else test
    with evaluating(model):
        whole = OutputChange(model, measure_on)
    measured = {"whole": _measure(model, measure_on, whole, heads)}
    progress(f"removing {len(selection.removed)} of {len(heads)} heads: {_kept(selection, keep)}")
    smaller = prune_portably(heads, selection, batches[0])
    with heads.ablated(selection.removed):
        measured["ablated"] = _measure(model, measure_on, whole, heads)
    measured["pruned"] = _measure(smaller, measure_on, whole, heads)
    if recover:
        progress(f"training {recover} steps")
        train_causal(smaller, batches, recover, learning_rate, seed, bar)
        measured["recovered"] = _measure(smaller, measure_on, whole, heads)
    names = tuple(layer.name for layer in heads.layers)
    return Pruned(smaller, selection, names, measured, test is not None, recover)


def _kept(selection: Selection, keep: float) -> str:
    """Say how many heads every layer keeps, and why that is not the share that was asked for."""
    before, after = selection.heads
    is_nearest = abs(after - keep * before) < 1
    return f"every layer keeps {after} of {before}" + (
        "" if is_nearest else f", the number nearest to {keep:.0%} that the config accepts"
    )


def rank_heads(
    heads: Heads,
    batches: Sequence[dict[str, Any]],
    keep: float,
    seed: int = 0,
    border: int = BORDER,
    bar: Bar = no_progress,
) -> Tensor:
    """Rank the heads of each layer: by gradient score, and by exact ablation on both sides of the cut.

    Exact ablation runs the model up to 2 x border x layers times from the ablated layer on, gradient scores once.

    Returns:
        [layers, heads]: 0 for the least important head of a layer, 1 for the next, and so on.
    """
    loss = label_free_loss(torch.Generator().manual_seed(seed))
    scores = first_order_importance(heads.model, loss, batches, normalise=False, layers=heads.layers)

    def ablate_exactly(at_cut: Sequence[Head]) -> dict[Head, float]:
        ablation = ablate_output(
            heads.model,
            batches,
            at_cut,
            layers=heads.layers,
            progress=lambda done, total: bar("ablating heads", done, total),
        )
        return dict(zip(at_cut, ablation.items.mean(1).tolist(), strict=True))

    return merge_ranks(scores, [layer.num_heads for layer in heads.layers], keep, border, ablate_exactly)


def merge_ranks(
    scores: Tensor,
    num_heads: Sequence[int],
    keep: float,
    border: int,
    ablate_exactly: Callable[[Sequence[Head]], Mapping[Head, float]],
) -> Tensor:
    """Rank the heads of each layer by score, and those next to the cut by the change that their ablation causes.

    Args:
        scores: gradient scores [layers, heads].
        num_heads: number of heads of each layer.
        keep: share of the heads that stay; it sets the cut.
        border: heads on each side of the cut to order by exact ablation.
        ablate_exactly: returns the change of the output for each of the (layer, head) pairs it is given.

    Returns:
        [layers, heads]: 0 for the least important head of a layer, 1 for the next, and so on.
    """
    orders, borders = [], []
    for row, number in enumerate(num_heads):
        orders.append(sorted(range(number), key=lambda head: float(scores[row, head])))
        cut = number - round(keep * number)
        borders.append(slice(max(0, cut - border), min(number, cut + border)))
    at_cut = [(row, head) for row, order in enumerate(orders) for head in order[borders[row]]]
    exact = ablate_exactly(at_cut) if at_cut else {}
    ranks = torch.zeros_like(scores)
    for row, order in enumerate(orders):
        order[borders[row]] = sorted(order[borders[row]], key=lambda head: exact[row, head])
        for rank, head in enumerate(order):
            ranks[row, head] = rank
    return ranks


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
        call(model, batch | {"labels": _labels(batch)}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def check_empty(out: Path) -> None:
    """Raise RunError if `out` is a file, or a folder that holds something, or cannot be created."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"--out {str(out)!r}: is not an empty folder; choose another")
    try:
        check_creatable(out)
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: cannot be written ({error.strerror}); choose another") from None


def write_checkpoint(pruned: Pruned, tokenizer: Any, out: Path, source: str) -> Path:
    """Write weights, config, tokenizer, model card and measurements into a new folder, completely or not at all.

    Args:
        pruned: the pruned model.
        tokenizer: the model's tokenizer; None writes no tokenizer.
        out: the folder to create; if it exists, it must be empty.
        source: name of the model that was pruned, for the model card.

    Raises:
        RunError: the folder is not empty, or cannot be written.
    """
    check_empty(out)
    model: Any = pruned.model
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as folder:
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            (folder / "pruning.json").write_text(json.dumps(as_json(pruned, source), indent=1), encoding="utf-8")
            (folder / "README.md").write_text(model_card(pruned, source), encoding="utf-8")
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: cannot be written ({error.strerror}); choose another") from None
    return out


def as_json(pruned: Pruned, source: str) -> dict[str, Any]:
    """Convert removed heads and measurements to a dictionary for JSON."""
    removed: dict[str, list[int]] = {}
    for layer, head in pruned.selection.removed:
        removed.setdefault(pruned.layers[layer], []).append(head)
    return {
        "source": source,
        "heads": list(pruned.selection.heads),
        "kv_heads": list(pruned.selection.kv_heads),
        "removed": removed,
        "recovery_steps": pruned.recover,
        "measured_on": pruned.measured_on,
        "measured": {name: asdict(values) for name, values in pruned.measured.items()},
    }


def table_rows(pruned: Pruned) -> list[list[str]]:
    """Format the measurements as rows of text: model, parameters, cache per token, time, quality."""
    causal = pruned.measured["whole"].perplexity is not None
    head = ["", "parameters", "cache per token", "forward pass", "perplexity" if causal else "change of output"]
    rows = [head]
    for name, values in pruned.measured.items():
        quality = f"{values.perplexity:.3f}" if values.perplexity is not None else f"{values.change:.4f}"
        cache = f"{values.cache_bytes:,} B" if values.cache_bytes else "-"
        rows.append([name, f"{values.parameters:,}", cache, f"{values.milliseconds:.1f} ms", quality])
    return rows


def terminal_tables(pruned: Pruned, full: bool = False) -> list[Table | str]:
    """Make the table for a terminal, and a line that names the text it was measured on.

    Args:
        pruned: the pruned model.
        full: also show the cache per token and the range of the times.
    """
    causal = pruned.measured["whole"].perplexity is not None
    rows = []
    for name, each in pruned.measured.items():
        spread = f" ({each.fastest:.1f} to {each.slowest:.1f})" if full else ""
        quality = three_digits(each.perplexity if causal else each.change)
        cache = [f"{each.cache_bytes:,} B" if each.cache_bytes else "-"] if full else []
        rows.append([name, f"{each.parameters:,}", f"{each.milliseconds:.1f} ms{spread}", quality, *cache])
    titles = ["model", "parameters", "forward pass", "perplexity" if causal else "change of output"]
    return [Table([*titles, *(["cache per token"] if full else [])], rows), f"Measured on {pruned.measured_on}."]


def model_card(pruned: Pruned, source: str) -> str:
    """Write a model card in Markdown that lists the removed heads and the measurements."""
    before, after = pruned.selection.heads
    kv_before, kv_after = pruned.selection.kv_heads
    head, *rows = table_rows(pruned)
    lines = [
        f"# {Path(source).name}, {after} of {before} attention heads per layer",
        "",
        f"Pruned from `{source}` with `repulsive prune`. Every layer keeps {after} of {before} query heads and "
        f"{kv_after} of {kv_before} key-value heads; the head size is unchanged. The pruned model computes what the "
        "original computes with these heads ablated; this was checked before it was written.",
        "",
        format_table(head, rows),
        "",
        f"Quality was measured on {pruned.measured_on}. Times are medians of {_RUNS} forward passes over one batch.",
        "",
        "Removed heads, counted from 0:",
        "",
        *(f"- `{name}`: {', '.join(map(str, heads))}" for name, heads in as_json(pruned, source)["removed"].items()),
        "",
    ]
    return "\n".join(lines)


def _is_causal(model: Any) -> bool:
    return not getattr(model.config, "is_encoder_decoder", False) and type(model).__name__.endswith(
        ("ForCausalLM", "LMHeadModel")
    )


def _labels(batch: dict[str, Any]) -> Tensor:
    labels: Tensor = batch["input_ids"].clone()
    return labels.masked_fill(batch["attention_mask"] == 0, -100) if "attention_mask" in batch else labels


@torch.no_grad()
def _measure(model: nn.Module, batches: Sequence[dict[str, Any]], change: OutputChange, heads: Heads) -> Measured:
    with evaluating(model):
        quality = perplexity(model, batches) if _is_causal(model) else None
        moved = float(change(model).mean())
    times = forward_milliseconds(model, batches[0])
    return Measured(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        cache_bytes=cache_bytes(model, heads),
        milliseconds=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        perplexity=quality,
        change=moved,
    )


@torch.no_grad()
def forward_milliseconds(model: nn.Module, batch: dict[str, Any], runs: int = _RUNS) -> list[float]:
    """Time forward passes over one batch, after one that is not timed."""
    times = []
    with evaluating(model):
        for _ in range(runs + 1):
            start = time.perf_counter()
            call(model, batch)
            times.append(1e3 * (time.perf_counter() - start))
    return times[1:]


@torch.no_grad()
def perplexity(model: nn.Module, batches: Sequence[dict[str, Any]]) -> float:
    """Compute the perplexity per token of a causal language model, without padding."""
    total, tokens = 0.0, 0
    for batch in batches:
        labels = _labels(batch)
        count = int((labels[:, 1:] != -100).sum())
        total += float(call(model, batch | {"labels": labels}).loss) * count
        tokens += count
    return float(torch.tensor(total / max(tokens, 1)).exp())


def cache_bytes(model: Any, heads: Heads) -> int:
    """Bytes of keys and values of one token in all layers of a causal model."""
    if not _is_causal(model):
        return 0
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = next(model.parameters()).element_size()
    return 2 * kv_heads * heads.layers[0].head_dim * len(heads.layers) * size

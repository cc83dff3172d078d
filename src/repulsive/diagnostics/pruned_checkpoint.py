"""Prune a model and write it as an ordinary checkpoint, with a list of removed heads and measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from repulsive.diagnostics.causal_models import is_causal, train_causal
from repulsive.diagnostics.head_ranking import BORDER, rank_heads
from repulsive.diagnostics.hooks.calling import evaluating
from repulsive.diagnostics.loading.model import LoadedModel
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_change import OutputChange
from repulsive.diagnostics.portable_pruning import Selection, check_portable, prune_portably, select_heads
from repulsive.diagnostics.pruning_measurements import RUNS, Measured, Runnable, measure, with_times
from repulsive.errors import DataError, RunError, SelectionError, UnsupportedWeights
from repulsive.safety.folders import check_creatable, replacing
from repulsive.safety.markdown import format_table
from repulsive.safety.permissions import ordinary_permissions
from repulsive.terminal.progress import Progress as Bar
from repulsive.terminal.progress import no_progress
from repulsive.terminal.table import Table, three_digits

Progress = Callable[[str], None]


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
    if recover and not is_causal(model):
        raise SelectionError(f"recovery needs a causal language model, {type(model).__name__} is not one; leave it out")
    heads = Heads(model, batches[0])
    check_portable(heads, keep, kv_heads)
    progress(f"scoring {len(heads)} heads")
    selection = select_heads(heads, rank_heads(heads, batches, keep, seed, border, bar), keep, kv_heads)
    measure_on = batches if test is None else test
    with evaluating(model):
        whole = OutputChange(model, measure_on)
    measured = {"whole": measure(model, measure_on, whole, heads)}
    progress(f"removing {len(selection.removed)} of {len(heads)} heads: {_kept(selection, keep)}")
    smaller = prune_portably(heads, selection, batches[0])
    with heads.ablated(selection.removed):
        measured["ablated"] = measure(model, measure_on, whole, heads)
    measured["pruned"] = measure(smaller, measure_on, whole, heads)
    if recover:
        progress(f"training {recover} steps")
        train_causal(smaller, batches, recover, learning_rate, seed, bar)
        measured["recovered"] = measure(smaller, measure_on, whole, heads)
    models: dict[str, Runnable] = dict.fromkeys(measured, (smaller, nullcontext))
    models |= {"whole": (model, nullcontext), "ablated": (model, lambda: heads.ablated(selection.removed))}
    measured = with_times(measured, models, measure_on[0])
    names = tuple(layer.name for layer in heads.layers)
    return Pruned(smaller, selection, names, measured, test is not None, recover)


def _kept(selection: Selection, keep: float) -> str:
    """Say how many heads every layer keeps, and why that is not the share that was asked for."""
    before, after = selection.heads
    is_nearest = abs(after - keep * before) < 1
    return f"every layer keeps {after} of {before}" + (
        "" if is_nearest else f", the possible number nearest to {keep:.0%}"
    )


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
        with replacing(out) as folder, ordinary_permissions(folder):
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
        f"Quality was measured on {pruned.measured_on}. Times are medians of {RUNS} forward passes over one batch; the "
        "models take turns.",
        "",
        "Removed heads, counted from 0:",
        "",
        *(f"- `{name}`: {', '.join(map(str, heads))}" for name, heads in as_json(pruned, source)["removed"].items()),
        "",
    ]
    return "\n".join(lines)

"""Recompute metrics from stored answers, and compare them with the reported ones.

A metric that can be recomputed is the mean of an array over items, or a function of sums over items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from repulsive.errors import RunError
from repulsive.metrics.bleu import bleu_of
from repulsive.metrics.correlation import f1_of, matthews_of, pearson_of

COMPARED = {"accuracy": "correct", "mse": "squared_error", "nll": "nll"}  # metric -> array whose mean it is
# metric -> array that is summed over items, and function of the sums
TOTALLED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bleu": ("bleu_statistics", bleu_of),
    "matthews": ("counts", matthews_of),
    "pearson": ("moments", pearson_of),
    "f1": ("counts", f1_of),
}
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6  # above the rounding errors of half precision and of reordered sums


def recomputed(items: Mapping[str, Tensor]) -> dict[str, float]:
    """Recompute the metrics that follow from the stored answers.

    Args:
        items: name -> tensor [N, ...].
    """
    metrics = {name: float(items[array].double().mean()) for name, array in COMPARED.items() if array in items}
    for name, (array, score) in TOTALLED.items():
        if array in items:
            metrics[name] = float(score(items[array].double().sum(0)))
    return metrics


def check_scores(metrics: Mapping[str, float], items: Mapping[str, Tensor], path: Path) -> None:
    """Check the metrics of a result against its answers.

    Args:
        metrics: metrics in `result.json`.
        items: the stored answers.
        path: file of the answers, for messages.

    Raises:
        RunError: a metric differs from the recomputed one, or `correct` from the logits and labels.
    """
    try:
        again = recomputed(items)
        wrong = _wrongly_marked(items)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise RunError(f"{path}: its answers cannot be scored ({error}); no training wrote them") from None
    for name, value in again.items():
        if name in metrics and not _close(float(metrics[name]), value):
            raise RunError(
                f"{path}: its answers give {name} {value:.6g}, but result.json says {metrics[name]:.6g}; one of the "
                "two was changed after the training wrote it"
            )
    if wrong:
        raise RunError(f"{path}: marks {wrong} answers as correct or wrong, contrary to its own logits and labels")


def _close(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _wrongly_marked(items: Mapping[str, Tensor]) -> int:
    if not all(name in items for name in ("logits", "labels", "correct")) or items["logits"].ndim != 2:
        return 0
    return int((items["correct"].bool() != (items["logits"].argmax(-1) == items["labels"])).sum())


def same_items(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of answers are about the same items, judged by their number and their labels."""
    both = [name for name in COMPARED.values() if name in a and name in b]
    if not both or any(a[name].shape != b[name].shape for name in both):
        return False
    labels = [items.get("labels") for items in (a, b)]
    return labels[0] is None or labels[1] is None or torch.equal(labels[0].cpu(), labels[1].cpu())

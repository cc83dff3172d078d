"""Which answers a metric is made of, and whether the two agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from repulsive.errors import RunError
from repulsive.metrics.bleu import bleu_of
from repulsive.metrics.correlation import f1_of, matthews_of, pearson_of

COMPARED = {"accuracy": "correct", "mse": "squared_error", "nll": "nll"}  # metric -> the array it is the mean of
# These are the mean of nothing, but functions of sums over items: metric -> what is summed, and the function.
TOTALLED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bleu": ("bleu_statistics", bleu_of),
    "matthews": ("counts", matthews_of),
    "pearson": ("moments", pearson_of),
    "f1": ("counts", f1_of),
}
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6  # half precision and the order of sums change less


def recomputed(items: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics that answers alone determine.

    Args:
        items: name -> tensor [N, ...].
    """
    found = {name: float(items[array].double().mean()) for name, array in COMPARED.items() if array in items}
    for name, (array, score) in TOTALLED.items():
        if array in items:
            found[name] = float(score(items[array].double().sum(0)))
    return found


def check_scores(metrics: Mapping[str, float], items: Mapping[str, Tensor], path: Path) -> None:
    """Refuse numbers that the answers do not give.

    Args:
        metrics: as `result.json` has them.
        items: the answers.
        path: of the answers, for the message.

    Raises:
        RunError: a metric differs from the one recomputed, or `correct` from the logits and labels.
    """
    try:
        again = recomputed(items)
        wrong = _wrong_marks(items)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise RunError(f"{path}: its answers cannot be scored ({error}); they are not those of a training") from None
    for name, value in again.items():
        if name in metrics and not _close(float(metrics[name]), value):
            raise RunError(
                f"{path}: its answers give {name} {value:.6g}, but result.json says {metrics[name]:.6g}; one of the "
                "two was changed after the training wrote it"
            )
    if wrong:
        raise RunError(f"{path}: marks {wrong} answers as right or wrong against its own logits and labels")


def _close(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _wrong_marks(items: Mapping[str, Tensor]) -> int:
    if not all(name in items for name in ("logits", "labels", "correct")) or items["logits"].ndim != 2:
        return 0
    return int((items["correct"].bool() != (items["logits"].argmax(-1) == items["labels"])).sum())


def same_items(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of answers are to the same items, as far as their number and their labels tell."""
    both = [name for name in COMPARED.values() if name in a and name in b]
    if not both or any(a[name].shape != b[name].shape for name in both):
        return False
    labels = [items.get("labels") for items in (a, b)]
    return labels[0] is None or labels[1] is None or torch.equal(labels[0].cpu(), labels[1].cpu())

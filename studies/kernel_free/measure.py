"""Measure finished runs: loss, heads, the kernel between them, and distances between the weights of two arms."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from studies.kernel_free.systems import KERNEL_FREE, NUDGED, PLAIN, PUBLISHED
from torch import Tensor
from torch.nn import functional as F

from repulsive import SVGD, find_heads
from repulsive.errors import RunError
from repulsive.lab.engine.recipe import Method
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import from_tables, restore_task
from repulsive.metrics.compare import Comparison, compare
from repulsive.particles import KernelFree
from repulsive.particles.gram import gram

LOSS = "nll"
PAIRS = (  # first minus second
    (PUBLISHED, KERNEL_FREE),
    (PUBLISHED, NUDGED),
    (PUBLISHED, PLAIN),
    (KERNEL_FREE, PLAIN),
)
_SELECTION = ("layers", "parts", "where", "particle", "layout")


def read_heads(run: RunFolder, method: Method) -> list[Tensor]:
    """Read the final weights of all groups that a method repels, [M, D] each.

    Raises:
        RunError: the run has no weights.
    """
    weights = run.best.latest()
    if weights is None:
        raise RunError(f"{run.path}: has no weights in best/; {run.remedy}")
    task = restore_task(from_tables(run.recipe, str(run.path)), run.assets())
    model = task.model()
    model.load_state_dict(weights[1]["model"])
    selection: dict[str, Any] = {name: getattr(method, name) for name in _SELECTION}
    return [group.read().detach().clone() for group in find_heads(task.repelled(model), **selection)]


def measure_arms(runs: Mapping[str, RunFolder], method: Method) -> dict[str, dict[str, Any]]:
    """Measure the arms of a system with one seed.

    Args:
        runs: arm -> finished run; the published rule is one of them.
        method: `[method]` table of the published rule, which selects the heads.

    Returns:
        arm -> measurements.
    """
    weights = {arm: read_heads(run, method) for arm, run in runs.items()}
    return {
        arm: {"loss": run.metrics("test")[LOSS], **describe_heads(weights[arm])}
        | {"distance": relative_distance(weights[arm], weights[PUBLISHED])}
        for arm, run in runs.items()
    }


def describe_heads(groups: Sequence[Tensor]) -> dict[str, Any]:
    """Describe groups of heads [M, D]: number and size; norm, cosine and kernel, means over groups.

    `kernel` has the 5th and the 95th percentile over pairs of M times the published kernel; where all distances are
    equal, all values are 1. `force` is the relative difference between the repulsion of the two rules.
    """
    kernels = [kernel_values(heads) for heads in groups]
    ends = torch.tensor([0.05, 0.95], dtype=torch.float64)
    return {
        "groups": len(groups),
        "heads": max(len(heads) for heads in groups),
        "numbers": max(heads.shape[1] for heads in groups),
        "norm": statistics.fmean(float(heads.norm(dim=1).mean()) for heads in groups),
        "cosine": statistics.fmean(mean_cosine(heads) for heads in groups),
        "kernel": [round(x, 4) for x in torch.cat(kernels).quantile(ends).tolist()],
        "force": statistics.fmean(force_difference(heads) for heads in groups),
    }


def mean_cosine(heads: Tensor) -> float:
    """Mean cosine between two heads of a group."""
    unit = F.normalize(heads, dim=1)
    return float((unit @ unit.T)[~torch.eye(len(heads), dtype=torch.bool)].mean())


def kernel_values(heads: Tensor) -> Tensor:
    r"""Compute $M \kappa(\theta_i, \theta_j)$ for all pairs i < j, with the paper's bandwidth: [M, D] -> [pairs]."""
    kernel = SVGD().interact(gram(heads.double())).values  # [M, M]
    rows, columns = torch.triu_indices(len(heads), len(heads), 1)
    values: Tensor = len(heads) * kernel[rows, columns]
    return values


def force_difference(heads: Tensor) -> float:
    """Difference between the repulsion of the published rule and the kernel-free one, relative to the published."""
    heads = heads.double()
    published, other = (rule(1.0, 1.0).gradient(heads, torch.zeros_like(heads)) for rule in (SVGD, KernelFree))
    return float((published - other).norm() / published.norm())


def relative_distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Distance between the weights of all heads of two runs, relative to the norm of the second."""
    a, b = (torch.cat([heads.flatten() for heads in groups]).double() for groups in (first, second))
    return float((a - b).norm() / b.norm())


def compare_losses(runs: Mapping[tuple[str, int], RunFolder]) -> dict[tuple[str, str], Comparison]:
    """Compare the test losses of two arms, paired by seed and test item, over seeds and items.

    Args:
        runs: (arm, seed) -> finished run.

    Returns:
        (first arm, second arm) -> comparison, for pairs with at least two seeds in common.
    """
    results = {}
    for pair in PAIRS:
        seeds = [{seed for name, seed in runs if name == arm} for arm in pair]
        if len(common := sorted(set.intersection(*seeds))) > 1:
            first, second = (torch.stack([runs[arm, seed].items("test")[LOSS] for seed in common]) for arm in pair)
            results[pair] = compare(first, second, over="both")
    return results

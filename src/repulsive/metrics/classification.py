"""Accuracy, calibration and uncertainty of a classifier, and diversity of its attention heads.

Probabilities are [N, C] with rows that sum to one; compute the softmax in float64, as `scores` does. To evaluate a test
set in batches, average a metric over batches, weighted by batch size. `ece` and `oe` need the whole set at once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

BINS = (15, 100)  # Guo et al. use 15, Thulasidasan et al. 100; the paper names neither, so both are reported


def scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute all metrics by name: accuracy, nll, brier, entropy, and ece and oe for each of `BINS`.

    Args:
        logits: [N, C].
        labels: class of each item [N].
    """
    p = logits.double().softmax(-1)
    metrics = {"accuracy": accuracy(p, labels), "nll": nll(p, labels), "brier": brier(p, labels)}
    metrics["entropy"] = entropy(p).mean()
    for bins in BINS:
        metrics[f"ece{bins}"], metrics[f"oe{bins}"] = ece(p, labels, bins), oe(p, labels, bins)
    return {name: float(value) for name, value in metrics.items()}


def accuracy(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""Accuracy $\frac1N \sum_n 1(\arg\max_c p_{nc} = y_n)$; a tie goes to the first class, and nan counts as wrong."""
    _check(probabilities, labels)
    valid = ~probabilities.isnan().any(-1)
    return ((probabilities.argmax(-1) == labels) & valid).double().mean()


def nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""Negative log-likelihood $-\frac1N \sum_n \ln p_{n y_n}$ in nats; infinite if a true class has probability 0."""
    _check(probabilities, labels)
    return -probabilities.double().gather(-1, labels.long().unsqueeze(-1)).log().mean()


def brier(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""Brier score $\frac1N \sum_n \sum_c (p_{nc} - 1(c = y_n))^2$, between 0 and 2 (Brier, 1950)."""
    _check(probabilities, labels)
    truth = torch.nn.functional.one_hot(labels.long(), probabilities.shape[-1])  # [N, C]
    return (probabilities.double() - truth).square().sum(-1).mean()


def entropy(probabilities: Tensor) -> Tensor:
    r"""Entropy $-\sum_c p_c \ln p_c$ of each prediction in nats, [..., C] -> [...], from 0 (certain) to ln C."""
    return torch.special.entr(probabilities.double()).sum(-1)


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    r"""Expected calibration error, $\sum_b \frac{|B_b|}{N} |acc(B_b) - conf(B_b)|$ (Guo et al., 2017).

    Args:
        probabilities: [N, C].
        labels: class of each item [N].
        bins: number of equal intervals ((b - 1) / bins, b / bins] of the confidence (the largest probability).

    Returns:
        A scalar between 0 and 1.
    """
    share, correct, confidence = binned(probabilities, labels, bins)
    return (share * (correct - confidence).abs()).sum()


def oe(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    r"""Overconfidence error, $\sum_b \frac{|B_b|}{N} conf(B_b) \max(conf(B_b) - acc(B_b), 0)$.

    Source: Thulasidasan et al. (2019). The bins are those of `ece`.
    """
    share, correct, confidence = binned(probabilities, labels, bins)
    return (share * confidence * (confidence - correct).clamp(min=0)).sum()


def binned(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the share of items, accuracy and mean confidence of each confidence bin, each [bins]; 0 for empty bins.

    Args:
        probabilities: [N, C].
        labels: class of each item [N].
        bins: as in `ece`.
    """
    _check(probabilities, labels)
    confidence, predicted = probabilities.double().max(-1)  # [N]
    upper = torch.arange(1, bins + 1, dtype=torch.float64, device=confidence.device) / bins  # [bins]
    index = torch.bucketize(confidence, upper).clamp(max=bins - 1)  # [N]; float32 rounding can exceed 1
    values = torch.stack([torch.ones_like(confidence), (predicted == labels).double(), confidence])  # [3, N]
    sums = torch.zeros(3, bins, dtype=torch.float64, device=confidence.device).index_add_(1, index, values)
    count = sums[0].clamp(min=1)
    return sums[0] / len(confidence), sums[1] / count, sums[2] / count


def dist(representations: Tensor) -> Tensor:
    r"""The paper's Dist metric: mean over items and pairs $i < j$ of $\|m_i - m_j\|_2$, [B, M, D] -> scalar.

    It grows with the norm of the representations; `relative_dist` does not.
    """
    return _over_pairs(_distances(representations, 2))


def relative_dist(representations: Tensor) -> Tensor:
    r"""`dist` divided by the mean norm $\frac{1}{BM} \sum_{bm} \|m_{bm}\|_2$: invariant to the scale of [B, M, D]."""
    return dist(representations) / representations.double().norm(dim=-1).mean()


def overlap(attention: Tensor, kind: Literal["mass", "cosine"] = "mass") -> Tensor:
    r"""Overlap of the attention of two heads: mean over items and pairs $i < j$, [B, M, T] -> scalar.

    Args:
        attention: attention weights over tokens; they sum to one for each head.
        kind: "mass", $\sum_t \min(a_{it}, a_{jt})$, the attention that two heads have in common, or "cosine",
            $a_i \cdot a_j / |a_i| |a_j|$. Both are 1 for equal heads and 0 for heads that share no token.
    """
    if kind == "mass":
        totals = attention.double().sum(-1)  # [B, M]
        both = totals.unsqueeze(-1) + totals.unsqueeze(-2)  # [B, M, M]
        return _over_pairs((both - _distances(attention, 1)) / 2)  # min(a, b) = (a + b - |a - b|) / 2
    if kind == "cosine":
        unit = torch.nn.functional.normalize(attention.double(), dim=-1)
        return _over_pairs(unit @ unit.mT)
    raise ValueError(f"kind={kind!r}: choose 'mass' or 'cosine'")


def evidence_coverage(attention: Tensor, evidence: Tensor, threshold: float = 0.3) -> Tensor:
    r"""Share of aspects that some head attends to: $\max_i \sum_{t \in E_k} a_{it} \ge$ threshold.

    Args:
        attention: attention weights over tokens [B, M, T].
        evidence: bool [B, K, T], the tokens that are evidence of each aspect; an aspect without tokens is ignored.
        threshold: smallest attention that one head must give to the evidence of an aspect.

    Returns:
        A scalar between 0 and 1, over all aspects present in the batch.

    Raises:
        ValueError: the shapes do not match, or no aspect has a token.
    """
    if evidence.ndim != 3 or evidence.shape[::2] != attention.shape[::2]:
        raise ValueError(
            f"evidence {list(evidence.shape)} does not match attention {list(attention.shape)}; "
            "need [B, K, T] and [B, M, T]"
        )
    present = evidence.any(-1)  # [B, K]
    if not present.any():
        raise ValueError("no aspect has evidence; coverage needs at least one token of evidence")
    given = attention.double() @ evidence.double().mT  # [B, M, K]
    return (given.amax(1) >= threshold)[present].double().mean()


def _distances(x: Tensor, p: float) -> Tensor:
    # The matrix-product form of cdist rounds the distance of nearly equal heads to 0, and such heads matter here.
    return torch.cdist(x.double(), x.double(), p=p, compute_mode="donot_use_mm_for_euclid_dist")  # [B, M, M]


def _over_pairs(x: Tensor) -> Tensor:
    heads = x.shape[-1]
    if heads < 2:
        raise ValueError("this metric compares pairs of heads: need at least two heads, got one")
    i, j = torch.triu_indices(heads, heads, 1, device=x.device)
    return x[..., i, j].mean()


def _check(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        shapes = f"probabilities {list(probabilities.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"{shapes}: need [N, C] and [N] with N > 0")

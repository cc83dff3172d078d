"""How good, how sure and how diverse a classifier is. Tensors in, numbers out.

Probabilities are [N, C] with rows that sum to one; take the softmax in float64 (`scores` does). Where a test set comes
in batches, the mean of a metric over it is the mean of the batches' values weighted by their sizes, except for `ece`
and `oe`, whose bins need the whole set at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = (15, 100)  # Guo et al. use 15, Thulasidasan et al. 100; the paper names neither, so both are reported


def scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Every metric of a set of predictions by name: accuracy, nll, brier, entropy, and ece and oe for each of `BINS`.

    Args:
        logits: [N, C].
        labels: class of each item [N].
    """
    p = logits.double().softmax(-1)
    found = {"accuracy": accuracy(p, labels), "nll": nll(p, labels), "brier": brier(p, labels)}
    found["entropy"] = entropy(p).mean()
    for bins in BINS:
        found[f"ece{bins}"], found[f"oe{bins}"] = ece(p, labels, bins), oe(p, labels, bins)
    return {name: float(value) for name, value in found.items()}


def accuracy(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""$\frac1N \sum_n 1(\arg\max_c p_{nc} = y_n)$; of equal winners the first class counts, nan is wrong."""
    _check(probabilities, labels)
    told = ~probabilities.isnan().any(-1)
    return ((probabilities.argmax(-1) == labels) & told).double().mean()


def nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""$-\frac1N \sum_n \ln p_{n y_n}$ in nats; infinite where a true class has probability zero."""
    _check(probabilities, labels)
    return -probabilities.double().gather(-1, labels.long().unsqueeze(-1)).log().mean()


def brier(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""$\frac1N \sum_n \sum_c (p_{nc} - 1(c = y_n))^2$, between 0 and 2 (Brier, 1950)."""
    _check(probabilities, labels)
    truth = torch.nn.functional.one_hot(labels.long(), probabilities.shape[-1])  # [N, C]
    return (probabilities.double() - truth).square().sum(-1).mean()


def entropy(probabilities: Tensor) -> Tensor:
    r"""$-\sum_c p_c \ln p_c$ of each prediction, in nats: [..., C] -> [...], from 0 (sure) to ln C."""
    return torch.special.entr(probabilities.double()).sum(-1)


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    r"""Expected calibration error, $\sum_b \frac{|B_b|}{N} |acc(B_b) - conf(B_b)|$ (Guo et al., 2017).

    Args:
        probabilities: [N, C].
        labels: class of each item [N].
        bins: equal intervals ((b - 1) / bins, b / bins] of the winning probability; 1.0 is in the last.

    Returns:
        A scalar between 0 and 1.
    """
    share, hit, sure = binned(probabilities, labels, bins)
    return (share * (hit - sure).abs()).sum()


def oe(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    r"""Overconfidence error, $\sum_b \frac{|B_b|}{N} conf(B_b) \max(conf(B_b) - acc(B_b), 0)$.

    Source: Thulasidasan et al. (2019). The bins are those of `ece`.
    """
    share, hit, sure = binned(probabilities, labels, bins)
    return (share * sure * (sure - hit).clamp(min=0)).sum()


def binned(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Share of the items, accuracy and mean confidence of each bin, zeros where it is empty: three times [bins].

    Args:
        probabilities: [N, C].
        labels: class of each item [N].
        bins: those of `ece`.
    """
    _check(probabilities, labels)
    sure, guess = probabilities.double().max(-1)  # [N]
    upper = torch.arange(1, bins + 1, dtype=torch.float64, device=sure.device) / bins  # [bins]
    place = torch.bucketize(sure, upper).clamp(max=bins - 1)  # [N]; float32 rounding can lift a winner above 1
    values = torch.stack([torch.ones_like(sure), (guess == labels).double(), sure])  # [3, N]
    sums = torch.zeros(3, bins, dtype=torch.float64, device=sure.device).index_add_(1, place, values)
    count = sums[0].clamp(min=1)
    return sums[0] / len(sure), sums[1] / count, sums[2] / count


def dist(representations: Tensor) -> Tensor:
    r"""The paper's Dist: mean over items and pairs $i < j$ of $\|m_i - m_j\|_2$, [B, M, D] -> scalar.

    It grows with the norm of the representations; `relative_dist` does not.
    """
    return _over_pairs(_distances(representations, 2))


def relative_dist(representations: Tensor) -> Tensor:
    r"""`dist` over the mean norm $\frac{1}{BM} \sum_{bm} \|m_{bm}\|_2$: the same for any scale of [B, M, D]."""
    return dist(representations) / representations.double().norm(dim=-1).mean()


def overlap(attention: Tensor, kind: str = "mass") -> Tensor:
    r"""How much heads look at the same words: mean over items and pairs $i < j$, [B, M, T] -> scalar.

    Args:
        attention: weights over the words, not negative, each head's summing to one.
        kind: "mass", $\sum_t \min(a_{it}, a_{jt})$, the attention two heads have in common, or "cosine",
            $a_i \cdot a_j / |a_i| |a_j|$. Both are 1 for equal heads and 0 for heads that share no word.
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
    r"""Share of the aspects some head looks at: $\max_i \sum_{t \in E_k} a_{it} \ge$ threshold.

    Args:
        attention: weights over the words [B, M, T].
        evidence: bool [B, K, T], which words are the evidence of each aspect; an aspect without a word does not count.
        threshold: least attention one head must give to an aspect's evidence.

    Returns:
        A scalar between 0 and 1, over all aspects present in the batch.

    Raises:
        ValueError: the shapes do not fit, or no aspect has a word.
    """
    if evidence.ndim != 3 or evidence.shape[::2] != attention.shape[::2]:
        raise ValueError(f"evidence {list(evidence.shape)} does not fit attention {list(attention.shape)}")
    present = evidence.any(-1)  # [B, K]
    if not present.any():
        raise ValueError("no aspect has any evidence: there is nothing to cover")
    given = attention.double() @ evidence.double().mT  # [B, M, K]
    return (given.amax(1) >= threshold)[present].double().mean()


def _distances(x: Tensor, p: float) -> Tensor:
    # The product form of cdist loses nearly equal heads to rounding, and those are the ones that matter here.
    return torch.cdist(x.double(), x.double(), p=p, compute_mode="donot_use_mm_for_euclid_dist")  # [B, M, M]


def _over_pairs(x: Tensor) -> Tensor:
    heads = x.shape[-1]
    if heads < 2:
        raise ValueError("one head has no pairs: this metric needs at least two heads")
    i, j = torch.triu_indices(heads, heads, 1, device=x.device)
    return x[..., i, j].mean()


def _check(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        shapes = f"probabilities {list(probabilities.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"{shapes}: need [N, C] and [N] with N > 0")

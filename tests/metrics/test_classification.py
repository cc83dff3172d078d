"""Metrics against loops that follow their formulas, and against small known cases."""

import math

import pytest
import torch

from repulsive.metrics.classification import (
    accuracy,
    brier,
    dist,
    ece,
    entropy,
    evidence_coverage,
    nll,
    oe,
    overlap,
    relative_dist,
    scores,
)


def random_predictions(items=200, classes=4, sharp=2.0):
    generator = torch.Generator().manual_seed(0)
    logits = sharp * torch.randn(items, classes, generator=generator)
    return logits.double().softmax(-1), torch.randint(classes, (items,), generator=generator)


def attention_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).double().mul(2).softmax(-1)


def loop_bins(p, y, bins):
    """[(share, accuracy, confidence)] of the bins that are not empty, item by item."""
    members = [[] for _ in range(bins)]
    for row, label in zip(p.tolist(), y.tolist(), strict=True):
        confidence = max(row)
        b = next(b for b in range(bins) if b / bins < confidence <= (b + 1) / bins)
        members[b].append((row.index(confidence) == label, confidence))
    return [(len(m) / len(y), sum(hit for hit, _ in m) / len(m), sum(c for _, c in m) / len(m)) for m in members if m]


def test_against_loops():
    p, y = random_predictions()
    rows, labels = p.tolist(), y.tolist()
    n = len(labels)
    right = sum(row.index(max(row)) == label for row, label in zip(rows, labels, strict=True))
    assert accuracy(p, y).item() == right / n
    assert nll(p, y).item() == pytest.approx(-sum(math.log(r[c]) for r, c in zip(rows, labels, strict=True)) / n)
    squares = sum((v - (k == c)) ** 2 for r, c in zip(rows, labels, strict=True) for k, v in enumerate(r))
    assert brier(p, y).item() == pytest.approx(squares / n)
    assert entropy(p)[7].item() == pytest.approx(-sum(v * math.log(v) for v in rows[7]))


@pytest.mark.parametrize("bins", [1, 2, 15, 100])
def test_calibration_against_loops(bins):
    p, y = random_predictions()
    expected = loop_bins(p, y, bins)
    assert ece(p, y, bins).item() == pytest.approx(sum(share * abs(a - c) for share, a, c in expected))
    assert oe(p, y, bins).item() == pytest.approx(sum(share * c * max(c - a, 0) for share, a, c in expected))


def test_calibration_of_known_cases():
    certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    for bins in (15, 100):
        assert ece(certain, torch.tensor([0, 0]), bins) == 0
        assert ece(certain, torch.tensor([1, 1]), bins) == oe(certain, torch.tensor([1, 1]), bins) == 1
        assert ece(certain, torch.tensor([0, 1]), bins) == 0.5
    uncertain = torch.tensor([[0.6, 0.4]] * 5, dtype=torch.float64)
    assert ece(uncertain, torch.tensor([0, 0, 0, 1, 1])).item() == pytest.approx(0)
    assert ece(uncertain, torch.zeros(5, dtype=torch.long)).item() == pytest.approx(0.4)
    assert oe(uncertain, torch.zeros(5, dtype=torch.long)) == 0
    assert oe(uncertain, torch.ones(5, dtype=torch.long)).item() == pytest.approx(0.36)


def test_an_edge_belongs_to_the_bin_below_and_rounding_above_one_is_allowed():
    p = torch.tensor([[0.5, 0.5], [0.51, 0.49]]).double()
    y = torch.tensor([1, 0])
    expected = (abs(0 - 0.5) + abs(1 - 0.51)) / 2  # two bins: (0, 1/2] and (1/2, 1]
    assert ece(p, y, 2).item() == pytest.approx(expected)
    assert ece(torch.tensor([[1.0000001, 0.0]]), torch.tensor([0])).item() == pytest.approx(0, abs=1e-6)


def test_extremes():
    uniform, y = torch.full((3, 5), 0.2).double(), torch.tensor([0, 1, 4])
    assert entropy(uniform).tolist() == pytest.approx([math.log(5)] * 3)
    assert nll(uniform, y).item() == pytest.approx(math.log(5))
    assert brier(uniform, y).item() == pytest.approx(0.8)
    wrong = torch.tensor([[1.0, 0.0]])
    assert brier(wrong, torch.tensor([1])) == 2
    assert nll(wrong, torch.tensor([1])) == math.inf
    assert entropy(wrong) == 0


def test_a_prediction_that_is_not_a_number_counts_as_wrong():
    probabilities = torch.tensor([[0.2, 0.8], [math.nan, math.nan], [math.nan, math.nan], [0.7, 0.3]])
    assert accuracy(probabilities, torch.tensor([1, 0, 1, 0])) == 0.5


def test_scores_are_the_metrics_of_the_softmax():
    logits, y = torch.randn(50, 3, generator=torch.Generator().manual_seed(3)), torch.arange(50) % 3
    p = logits.double().softmax(-1)
    result = scores(logits, y)
    assert set(result) == {"accuracy", "nll", "brier", "entropy", "ece15", "oe15", "ece100", "oe100"}
    assert result["ece100"] == ece(p, y, 100).item() and result["oe15"] == oe(p, y, 15).item()
    assert result["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits.double(), y).item())


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece, oe])
def test_shapes_are_checked(metric):
    with pytest.raises(ValueError, match=r"need \[N, C\]"):
        metric(torch.rand(4, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="N > 0"):
        metric(torch.rand(0, 3), torch.zeros(0, dtype=torch.long))


def test_dist_against_a_loop_and_its_invariances():
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)).double()
    pairs = [(x[b, i] - x[b, j]).norm().item() for b in range(6) for i in range(5) for j in range(i)]
    assert dist(x).item() == pytest.approx(sum(pairs) / len(pairs))
    assert dist(x[:, torch.tensor([3, 0, 4, 1, 2])]).item() == pytest.approx(dist(x).item())
    assert dist(x + 7).item() == pytest.approx(dist(x).item())
    assert dist(3 * x).item() == pytest.approx(3 * dist(x).item())
    assert relative_dist(3 * x).item() == pytest.approx(relative_dist(x).item())
    assert dist(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])) == 5
    assert relative_dist(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])) == 2
    with pytest.raises(ValueError, match="two heads"):
        dist(x[:, :1])


def test_dist_resolves_heads_that_are_almost_equal():
    heads = 1000 * torch.randn(1, 1, 600, generator=torch.Generator().manual_seed(4)).repeat(1, 2, 1)
    heads[0, 1, 0] += 1e-3
    assert dist(heads).item() == pytest.approx(float(heads[0, 1, 0]) - float(heads[0, 0, 0]), rel=1e-6)


def test_overlap():
    a = attention_of(3, 4, 7)
    pairs = [torch.minimum(a[b, i], a[b, j]).sum().item() for b in range(3) for i in range(4) for j in range(i)]
    assert overlap(a).item() == pytest.approx(sum(pairs) / len(pairs))
    cosines = [
        torch.cosine_similarity(a[b, i], a[b, j], dim=0).item() for b in range(3) for i in range(4) for j in range(i)
    ]
    assert overlap(a, "cosine").item() == pytest.approx(sum(cosines) / len(cosines))
    for kind in ("mass", "cosine"):
        assert overlap(a[:, :1].expand(-1, 4, -1), kind).item() == pytest.approx(1)
        assert overlap(torch.eye(4).unsqueeze(0), kind) == 0
        padded = torch.nn.functional.pad(a, (0, 5))
        assert overlap(padded, kind).item() == pytest.approx(overlap(a, kind).item())
    with pytest.raises(ValueError, match="kind='l2'"):
        overlap(a, "l2")


def test_evidence_coverage_by_hand():
    attention = torch.tensor([[[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.2, 0.5]]])  # [1, 2 heads, 4 words]
    evidence = torch.zeros(1, 4, 4, dtype=torch.bool)
    evidence[0, 0, 0] = True  # head 0 gives 0.7
    evidence[0, 1, 1:3] = True  # head 1 gives 0.4 in all
    evidence[0, 2, 1] = True  # no head gives more than 0.2
    assert evidence_coverage(attention, evidence, 0.3).item() == pytest.approx(2 / 3)  # the fourth aspect is absent
    assert evidence_coverage(attention, evidence, 0.6).item() == pytest.approx(1 / 3)
    assert evidence_coverage(attention, evidence, 0.1) == 1
    assert evidence_coverage(attention.flip(1), evidence, 0.3).item() == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no aspect has evidence"):
        evidence_coverage(attention, torch.zeros(1, 2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="does not match"):
        evidence_coverage(attention, evidence[:, :, :3])

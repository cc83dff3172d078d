"""Calibration against torchmetrics and explicit loops; entropy curves and AUROC over every pair."""

import math

import pytest
import torch

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.uncertainty import auroc, detect_foreign, entropy_cdf
from repulsive.metrics.classification import ece, oe


def predictions(count: int, classes: int = 4, sharp: float = 2.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    p = (sharp * torch.randn(count, classes, generator=make)).softmax(-1)
    return p, torch.randint(classes, (count,), generator=make)


@pytest.mark.parametrize("bins", [1, 7, 15, 100])
def test_reliability_equals_a_loop_over_items(bins):
    p, y = predictions(300)
    found = reliability(p, y, bins)
    for b in range(bins):
        low, high = float(found.lower[b]), float(found.upper[b])
        mine = [n for n in range(300) if low < float(p[n].double().max()) <= high]
        assert int(found.count[b]) == len(mine)
        if mine:
            accuracy = sum(int(p[n].argmax()) == int(y[n]) for n in mine) / len(mine)
            assert float(found.accuracy[b]) == pytest.approx(accuracy)
            confidence = sum(float(p[n].max()) for n in mine) / len(mine)
            assert float(found.confidence[b]) == pytest.approx(confidence)
        else:
            assert math.isnan(float(found.accuracy[b])) and math.isnan(float(found.confidence[b]))
    assert found.ece == pytest.approx(float(ece(p, y, bins)))
    assert found.oe == pytest.approx(float(oe(p, y, bins))) and found.oe > 0


@pytest.mark.parametrize("bins", [5, 15])
def test_ece_equals_torchmetrics(bins):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    p, y = predictions(500, seed=3)
    found = reliability(p, y, bins)
    theirs = functional.multiclass_calibration_error(p, y, num_classes=4, n_bins=bins, norm="l1")
    assert found.ece == pytest.approx(float(theirs), abs=1e-6)


def test_overconfidence_has_a_positive_gap():
    p = torch.tensor([[0.95, 0.05]]).repeat(10, 1)
    found = reliability(p, torch.tensor([0] * 6 + [1] * 4), bins=10)
    assert float(found.gap[9]) == pytest.approx(0.35)
    assert found.count.tolist() == [0] * 9 + [10]


def test_entropy_cdf_counts_predictions():
    p, _ = predictions(200)
    found = entropy_cdf(p, points=21)
    entropies = [-sum(x * math.log(x) for x in row if x > 0) for row in p.double().tolist()]
    for h, share in zip(found.entropy.tolist(), found.share.tolist(), strict=True):
        assert share == pytest.approx(sum(e <= h for e in entropies) / 200)
    assert float(found.entropy[-1]) == pytest.approx(math.log(4))
    uniform = entropy_cdf(torch.full((3, 5), 0.2), points=11)
    assert uniform.share.tolist() == [0.0] * 10 + [1.0]
    assert entropy_cdf(torch.eye(3), points=4).share.tolist() == [1.0] * 4


def test_auroc_over_every_pair_with_ties():
    make = torch.Generator().manual_seed(1)
    low, high = torch.randint(0, 6, (40,), generator=make), torch.randint(1, 8, (25,), generator=make)
    wins = sum(float(p > q) + 0.5 * float(p == q) for p in high.tolist() for q in low.tolist()) / 1000
    assert auroc(low, high) == pytest.approx(wins)
    assert auroc(high, low) == pytest.approx(1 - wins)
    functional = pytest.importorskip("torchmetrics.functional.classification")
    scores = torch.cat([low, high]).double() / 10
    truth = torch.cat([torch.zeros(40), torch.ones(25)]).long()
    assert auroc(low, high) == pytest.approx(float(functional.binary_auroc(scores, truth)), abs=1e-6)


def test_auroc_equals_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    make = torch.Generator().manual_seed(2)
    low, high = torch.randn(50, generator=make), torch.randn(30, generator=make) + 1
    truth = [0] * 50 + [1] * 30
    assert auroc(low, high) == pytest.approx(metrics.roc_auc_score(truth, torch.cat([low, high]).numpy()))


def test_entropy_detects_foreign_inputs():
    confident, _ = predictions(100, sharp=6.0)
    uncertain, _ = predictions(80, sharp=0.3, seed=1)
    found = detect_foreign(confident, uncertain)
    assert found.auroc > 0.95 and found.inside < found.outside
    assert detect_foreign(confident, confident).auroc == pytest.approx(0.5)


def test_invalid_arguments_are_refused():
    p, y = predictions(5)
    for call in (
        lambda: reliability(p, y, 0),
        lambda: reliability(p, y[:3]),
        lambda: entropy_cdf(p[:0]),
        lambda: entropy_cdf(p, points=1),
        lambda: auroc(torch.zeros(0), torch.ones(1)),
        lambda: auroc(torch.tensor([math.nan]), torch.ones(1)),
        lambda: detect_foreign(p, p[:0]),
    ):
        with pytest.raises(ValueError, match="need"):
            call()


def test_nan_predictions_are_not_perfectly_calibrated():
    p, labels = predictions(20)
    p[3] = math.nan
    found = reliability(p, labels)
    assert all(map(math.isnan, (found.ece, found.oe, float(ece(p, labels)))))
    assert entropy_cdf(p).share.isnan().all()

"""The measures of GLUE: by hand, against scipy and scikit-learn where they are, and what does not change them."""

import importlib

import pytest
import torch

from repulsive.metrics.compare import compare, compare_totals
from repulsive.metrics.correlation import counts as counts_of
from repulsive.metrics.correlation import (
    f1,
    f1_of,
    matthews,
    matthews_of,
    moments,
    pearson,
    pearson_of,
    spearman,
)
from repulsive.metrics.ranks import ranks


def optional(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def draw(seed, count=200):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    flips = torch.rand(count, generator=generator) < 0.3
    points = torch.randint(26, (count,), generator=generator) / 5  # with ties
    guesses = points + torch.randn(count, generator=generator).round(decimals=1)
    return labels, labels ^ flips, points, guesses


def counts(guesses, labels):
    return [int(((guesses == g) & (labels == t)).sum()) for g, t in ((1, 1), (0, 0), (1, 0), (0, 1))]


@pytest.mark.parametrize("seed", range(4))
def test_two_classes_by_their_counts(seed):
    labels, guesses, *_ = draw(seed)
    tp, tn, fp, fn = counts(guesses, labels)
    expected = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert float(matthews(guesses, labels)) == pytest.approx(expected, abs=1e-12)
    assert float(f1(guesses, labels)) == pytest.approx(2 * tp / (2 * tp + fp + fn), abs=1e-12)


def test_known_answers():
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    assert float(matthews(labels, labels)) == 1.0 and float(matthews(1 - labels, labels)) == -1.0
    # 2 of 3 right in either class: (4 - 1) / 9
    assert float(matthews(torch.tensor([1, 1, 0, 0, 0, 1]), labels)) == pytest.approx(1 / 3)
    assert ranks(torch.tensor([10.0, 20.0, 10.0, 5.0, 10.0])).tolist() == [3, 5, 3, 1, 3]
    # 1 - 6 sum d^2 / n (n^2 - 1), without ties: d = 1, 1, 0, 0
    assert float(spearman(torch.tensor([2.0, 1, 3, 4]), torch.tensor([1.0, 2, 3, 4]))) == pytest.approx(1 - 12 / 60)
    correlation = pearson(torch.tensor([1.0, 2, 3]), torch.tensor([2.0, 4, 7]))
    assert float(correlation) == pytest.approx(5 / (2 * 38 / 3) ** 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_against_other_packages(seed):
    """Against numpy, which has Pearson's; against scipy and scikit-learn where they are installed."""
    numpy, stats, sklearn = importlib.import_module("numpy"), optional("scipy.stats"), optional("sklearn.metrics")
    labels, classes, points, guesses = draw(seed)
    a, b = guesses.double().numpy(), points.double().numpy()
    assert float(pearson(guesses, points)) == pytest.approx(numpy.corrcoef(a, b)[0, 1], abs=1e-9)
    of_ranks = numpy.corrcoef(ranks(guesses).numpy(), ranks(points).numpy())[0, 1]
    assert float(spearman(guesses, points)) == pytest.approx(of_ranks, abs=1e-9)
    below = (points.unsqueeze(0) < points.unsqueeze(1)).sum(1)  # another way to count ranks
    equal = (points.unsqueeze(0) == points.unsqueeze(1)).sum(1)
    assert torch.equal(ranks(points), below + (equal + 1) / 2)
    if stats is not None:
        assert float(spearman(guesses, points)) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)
    if sklearn is not None:
        assert float(matthews(classes, labels)) == pytest.approx(sklearn.matthews_corrcoef(labels, classes), abs=1e-9)
        assert float(f1(classes, labels)) == pytest.approx(sklearn.f1_score(labels, classes), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_statistics_give_the_same(seed):
    labels, guesses, points, answers = draw(seed)
    totals = counts_of(guesses, labels).sum(0)
    assert float(matthews_of(totals)) == pytest.approx(float(matthews(guesses, labels)), abs=1e-12)
    assert float(f1_of(totals)) == pytest.approx(float(f1(guesses, labels)), abs=1e-12)
    correlation = float(pearson(answers, points))
    assert float(pearson_of(moments(answers, points).sum(0))) == pytest.approx(correlation, abs=1e-9)
    one = counts_of(torch.ones_like(labels), labels).sum(0)
    assert float(matthews_of(one)) == 0.0
    flat = torch.full_like(answers, 0.3)
    assert float(pearson_of(moments(flat, points).sum(0))) == 0.0


def test_runs_are_compared_by_a_correlation():
    """A better system is told apart, one that answers the same is not; a mean comes out as `compare` has it."""
    labels, guesses, *_ = draw(1)
    better = torch.where(torch.arange(200) % 2 == 0, labels, guesses)  # half of the mistakes put right
    a, b = counts_of(better, labels), counts_of(guesses, labels)
    found = compare_totals(a, b, matthews_of)
    assert found.difference == pytest.approx(float(matthews(better, labels) - matthews(guesses, labels)))
    assert 0 < found.low < found.difference < found.high and found.p_value < 0.01
    same = compare_totals(b, b, matthews_of)
    assert same.difference == same.low == same.high == 0 and same.p_value == 1
    right = [(x == labels).double().unsqueeze(1) for x in (better, guesses)]
    mean = compare_totals(*(torch.cat([torch.ones(200, 1), x], 1) for x in right), lambda t: t[..., 1] / t[..., 0])
    known = compare(*(x[:, 0] for x in right))
    assert mean.difference == pytest.approx(known.difference)
    assert mean.low == pytest.approx(known.low, abs=0.02) and mean.high == pytest.approx(known.high, abs=0.02)


def test_what_does_not_change_them():
    labels, guesses, points, answers = draw(9)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    assert float(matthews(guesses[order], labels[order])) == pytest.approx(float(matthews(guesses, labels)))
    assert float(matthews(1 - guesses, 1 - labels)) == pytest.approx(float(matthews(guesses, labels)))
    assert float(spearman(answers.double().exp(), points)) == pytest.approx(float(spearman(answers, points)))
    assert float(pearson(3 * answers - 7, points)) == pytest.approx(float(pearson(answers, points)), abs=1e-6)


def test_one_class_only():
    labels, same = torch.tensor([1, 0, 1]), torch.ones(3, dtype=torch.int64)
    assert float(matthews(same, labels)) == float(matthews(labels, same)) == 0.0
    assert float(f1(1 - same, 1 - same)) == 0.0
    assert float(spearman(torch.full((3,), 0.1), torch.tensor([1.0, 2.0, 3.0]))) == 0.0
    varying, constant = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.full((50,), 0.1)
    for pair in ((varying, constant), (constant, varying)):
        assert float(pearson_of(moments(*pair).sum(0))) == 0.0
    with pytest.raises(ValueError, match=r"\[3\] and \[2\]"):
        matthews(labels, labels[:2])


def test_what_hardly_varies_is_not_taken_for_constant():
    torch.manual_seed(0)
    labels = 5 * torch.rand(200)
    good, flat = labels + torch.randn(200), 2.7 + 2e-5 * (labels + torch.randn(200))
    for answers in (good, flat):
        assert torch.allclose(pearson_of(moments(answers, labels).sum(0)), pearson(answers, labels), atol=1e-4)
    result = compare_totals(moments(flat, labels), moments(good, labels), pearson_of, resamples=50)
    assert result.difference == pytest.approx(float(pearson(flat, labels) - pearson(good, labels)), abs=1e-4)


def test_nan_is_no_answer():
    nan, labels = torch.full((5,), torch.nan), torch.arange(5.0)
    assert spearman(nan, labels).isnan() and pearson(nan, labels).isnan() and ranks(nan).isnan().all()
    assert pearson_of(moments(nan, labels).sum(0)).isnan()
    with pytest.raises(ValueError, match="infinite or missing"):
        compare_totals(moments(nan, labels), moments(labels, labels), pearson_of)
    for wrong in ({"level": 1.5}, {"resamples": 0}):
        with pytest.raises(ValueError, match="must lie between"):
            compare_totals(moments(labels, labels), moments(labels, labels), pearson_of, **wrong)

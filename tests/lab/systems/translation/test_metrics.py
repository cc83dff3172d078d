"""BLEU against sacrebleu and by hand, and comparisons that see a difference where there is one."""

import math
import random
import sys

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.systems.translation.metrics import chrf, paper_bleu, sacrebleu, statistics
from repulsive.metrics.bleu import bleu_of
from repulsive.metrics.compare import compare_totals

pytest.importorskip("sacrebleu")
REFERENCES = ["The cat sat on the mat .", "It is a dog in the rain , is it not ?", "Two men walk ."]


def noisy(rate, seed, references=REFERENCES):
    source = random.Random(seed)
    swap = lambda word: "x" if source.random() < rate else word  # noqa: E731
    return [" ".join(swap(word) for word in line.split()) for line in references]


def test_bleu_by_hand():
    """One sentence, one word wrong: precisions 4/5, 2/4, 1/3, 0/2 would give 0, so a longer one."""
    hypothesis, reference = ["a b c d e f X"], ["a b c d e f g h"]
    expected = 100 * math.exp(1 - 8 / 7) * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25
    assert paper_bleu(hypothesis, reference).value == pytest.approx(expected)
    assert bleu_of(statistics(hypothesis, reference).sum(0)) == pytest.approx(expected)
    long = ["a b c d e f g h X"]  # longer than the reference: precision falls, and there is no brevity penalty
    expected = 100 * (8 / 9 * 7 / 8 * 6 / 7 * 5 / 6) ** 0.25
    assert paper_bleu(long, reference).value == pytest.approx(expected)
    assert bleu_of(statistics(long, reference).sum(0)) == pytest.approx(expected)
    assert paper_bleu(["a b c d X"], ["a b c e X"]).value == 0  # no 4-gram in common, and nothing is smoothed


def test_statistics_add_up_to_what_sacrebleu_says():
    hypotheses = noisy(0.15, 1)
    found = statistics(hypotheses, REFERENCES)
    assert found.shape == (3, 10) and found[:, 1].tolist() == [7, 12, 4]
    assert float(bleu_of(found.sum(0))) == pytest.approx(paper_bleu(hypotheses, REFERENCES).value)
    some = bleu_of(found[[0, 1, 1]].sum(0))
    assert float(some) == pytest.approx(
        paper_bleu([hypotheses[i] for i in (0, 1, 1)], [REFERENCES[i] for i in (0, 1, 1)]).value
    )


def test_case_tokens_and_signatures():
    lower = [line.lower() for line in REFERENCES]
    assert paper_bleu(lower, REFERENCES).value == pytest.approx(100)
    assert "tok:none" in paper_bleu(lower, REFERENCES).signature and "case:lc" in paper_bleu(lower, lower).signature
    text = ["The cat sat on the mat.", "It is a dog in the rain, is it not?", "Two men walk."]
    assert sacrebleu(text, REFERENCES).value == pytest.approx(100)  # tokenised by sacrebleu, both of them
    assert "tok:13a" in sacrebleu(text, text).signature and "version:" in sacrebleu(text, text).signature
    assert sacrebleu(lower, REFERENCES).value < 100 == pytest.approx(sacrebleu(lower, text, lowercase=True).value)
    assert chrf(text, text).value == pytest.approx(100) and chrf(["aaa"], ["bbb"]).value == 0


def test_a_difference_is_found_and_none_is_not():
    lines = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4} w{i + 5} w{i + 6}" for i in range(60)]
    good, bad, other = (statistics(noisy(rate, seed, lines), lines) for rate, seed in ((0.1, 1), (0.3, 2), (0.1, 3)))
    result = compare_totals(good, bad, bleu_of)
    difference = float(bleu_of(good.sum(0)) - bleu_of(bad.sum(0)))
    assert result.difference == pytest.approx(difference) and result.low < difference < result.high
    assert result.p_value < 0.01 and result.low > 0
    back = compare_totals(bad, good, bleu_of)
    assert back.difference == -result.difference and back.p_value < 0.01
    even = compare_totals(good, other, bleu_of)
    assert even.p_value > 0.05 and even.low < 0 < even.high
    assert compare_totals(good, good, bleu_of).p_value == 1
    assert compare_totals(good, bad, bleu_of) == result  # the same seed, the same answer


def test_seeds_and_items_together():
    lines = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4} w{i + 5}" for i in range(40)]
    a, b = (
        torch.stack([statistics(noisy(rate, start + s, lines), lines) for s in range(4)])
        for rate, start in ((0.05, 0), (0.3, 10))
    )
    both = compare_totals(a, b, bleu_of, "both")
    assert both.p_value == 2 ** (1 - 4) and (both.seeds, both.items) == (4, 40)
    runs = bleu_of(a.sum(1)) - bleu_of(b.sum(1))
    assert both.difference == pytest.approx(float(runs.mean()))
    only, items = compare_totals(a, b, bleu_of, "seeds"), compare_totals(a, b, bleu_of, "items")
    half = 3.182446305284 * float(runs.std()) / 4**0.5  # Student's t, three degrees of freedom
    assert (only.low, only.high) == pytest.approx((only.difference - half, only.difference + half))
    assert both.high - both.difference == pytest.approx(math.hypot(half, items.high - items.difference), rel=0.02)
    assert items.p_value < 0.01


def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="both need"):
        compare_totals(torch.ones(3, 10), torch.ones(4, 10), bleu_of)
    with pytest.raises(ValueError, match="at least two"):
        compare_totals(torch.ones(1, 3, 10), torch.ones(1, 3, 10), bleu_of, "both")
    with pytest.raises(DataError, match="2 translations for 3 references"):
        paper_bleu(["a", "b"], REFERENCES)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[translation\]'"):
        paper_bleu(["a"], ["a"])

"""Searches against all there is to find, against a search written with lists, and against themselves."""

import itertools
import math

import pytest
import torch

from repulsive.lab.layers.beam_search import Ends, beam_search, extend_beam, limits
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig

BOS, EOS = 2, 3
ENDS = Ends(BOS, EOS)


def make(vocabulary=7, end=0.0):
    """Random weights, large enough for answers to differ; `end` makes the end more or less likely."""
    torch.manual_seed(1)
    model = Transformer(TransformerConfig.tiny(vocabulary, width=16, feed_forward=16, heads=2)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
        model.decoder.layers[-1].norms[2].bias.add_(end * model.embedding.weight[EOS])
    return model


def sentences(count, longest=6, vocabulary=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw)
    table = torch.randint(4, vocabulary, (count, longest), generator=draw)
    return table.masked_fill(torch.arange(longest) >= lengths[:, None], 0)


def log_probability(model, source, words):
    """Of words and the end, by the full forward pass."""
    target = torch.tensor([[BOS, *words]])
    steps = model(source[None], target).log_softmax(-1)[0].detach()
    return sum(float(steps[i, word]) for i, word in enumerate([*words, EOS]))


def listed(model, source, beam, alpha, longest, exact):
    """The same search, one sentence, with lists and without a cache."""
    limit = int(limits(source[None], 0, longest))
    alive, done = [((), 0.0)], []
    for length in range(1, limit + 1):
        options = []
        for words, value in alive:
            steps = model(source[None], torch.tensor([[BOS, *words]])).log_softmax(-1)[0, -1].tolist()
            allowed = [EOS] if length == limit else [w for w in range(len(steps)) if w not in (0, BOS)]
            options += [((*words, word), value + steps[word]) for word in allowed]
        options = sorted(options, key=lambda o: -o[1])[: 2 * beam]
        done += [(value / length**alpha, words[:-1]) for words, value in options[:beam] if words[-1] == EOS]
        done = sorted(done, reverse=True)[:beam]
        alive = [option for option in options if option[0][-1] != EOS][:beam]
        bound = alive[0][1] / limit**alpha if alive and exact else -math.inf
        if not alive or (len(done) == beam and done[-1][0] >= bound):
            break
    return done


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_everything_there_is(alpha):
    """Three words and the end, at most three tokens: 1 + 3 + 9 translations, all of them found and in order."""
    model, source = make(6), sentences(3, vocabulary=6)
    found = beam_search(model, source, ENDS, beam=20, nbest=20, alpha=alpha, longest=3)
    for row, hypotheses in zip(source, found, strict=True):
        every = [words for n in range(3) for words in itertools.product((1, 4, 5), repeat=n)]
        values = {words: log_probability(model, row, words) for words in every}
        order = sorted(every, key=lambda words: -values[words] / (len(words) + 1) ** alpha)
        assert [h.tokens for h in hypotheses] == order and len(order) == 13
        for h in hypotheses:
            assert h.log_probability == pytest.approx(values[h.tokens], abs=1e-9)
            assert h.score == pytest.approx(values[h.tokens] / (len(h.tokens) + 1) ** alpha, abs=1e-9)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("beam", "alpha"), [(1, 1.0), (2, 0.0), (3, 1.0), (5, 0.6)])
@pytest.mark.parametrize("end", [-1.0, 0.5])
def test_it_is_the_search_written_with_lists(beam, alpha, exact, end):
    """Translations that end late and some that end at once."""
    model, source = make(end=end), sentences(6)
    found = beam_search(model, source, ENDS, beam=beam, alpha=alpha, nbest=beam, longest=9, exact=exact)
    for row, hypotheses in zip(source, found, strict=True):
        expected = listed(model, row, beam, alpha, 9, exact)
        assert [h.tokens for h in hypotheses] == [words for _, words in expected]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-9)


def greedy(model, source, longest):
    """The most probable token after another, by the full forward pass; words and their log-probability."""
    limit, words, total = int(limits(source[None], 0, longest)), [], 0.0
    while True:
        steps = model(source[None], torch.tensor([[BOS, *words]])).log_softmax(-1)[0, -1].tolist()
        allowed = [EOS] if len(words) + 1 == limit else [w for w in range(len(steps)) if w not in (0, BOS)]
        best = max(allowed, key=steps.__getitem__)
        total += steps[best]
        if best == EOS:
            return tuple(words), total
        words.append(best)


def test_a_beam_of_one_is_greedy():
    for end in (-1.0, 0.0, 0.5):
        model, source = make(end=end), sentences(12)
        best = [hypotheses[0] for hypotheses in beam_search(model, source, ENDS, beam=1, longest=12)]
        for row, hypothesis in zip(source, best, strict=True):
            words, value = greedy(model, row, longest=12)
            scores = (hypothesis.score, hypothesis.log_probability)
            assert words == hypothesis.tokens and scores == pytest.approx((value / (len(words) + 1), value), abs=1e-9)
    assert len({len(hypothesis.tokens) for hypothesis in best}) > 1


def test_company_changes_nothing():
    """Sentences of different lengths in one batch, that end at different steps, and each by itself without padding."""
    model, source = make(end=0.2), sentences(10, longest=8)
    found = beam_search(model, source, ENDS, beam=4, nbest=4, longest=14)
    for row, hypotheses in zip(source, found, strict=True):
        (alone,) = beam_search(model, row[row != 0][None], ENDS, beam=4, nbest=4, longest=14)
        assert [h.tokens for h in alone] == [h.tokens for h in hypotheses]
        assert [h.score for h in alone] == pytest.approx([h.score for h in hypotheses], abs=1e-9)
    assert len({len(hypotheses[0].tokens) for hypotheses in found}) > 2


def test_nothing_that_was_finished_is_lost():
    """What is best when the search may stop early is still there, or beaten, when it goes on."""
    model, source = make(end=0.5), sentences(8)
    early = beam_search(model, source, ENDS, beam=3, nbest=3, longest=12)
    late = beam_search(model, source, ENDS, beam=3, nbest=3, longest=12, exact=True)
    better = 0
    for first, second in zip(early, late, strict=True):
        assert all(b.score >= a.score - 1e-12 for a, b in zip(first, second, strict=True))
        better += second != first
    assert better, "the early stop never stopped early: the test shows nothing"


def test_limits_and_forbidden_tokens():
    model, source = make(end=-8.0), sentences(5)
    assert limits(source, 0, 200).tolist() == [2 * int((row != 0).sum()) + 10 for row in source]
    for hypotheses in beam_search(model, source, ENDS, beam=2, nbest=2, longest=5):
        assert len(hypotheses) == 2
        for h in hypotheses:
            assert len(h.tokens) == 4 and not {0, BOS, EOS} & set(h.tokens)
    for settings in ({"nbest": 6}, {"beam": 0}, {"alpha": -1}, {"longest": 0}):
        with pytest.raises(ValueError, match="needs 1 <= nbest <= beam"):
            beam_search(model, source, ENDS, **settings)


def test_a_vocabulary_smaller_than_the_beam():
    model, source = make(5), sentences(2, vocabulary=5)
    (first, _) = beam_search(model, source, ENDS, beam=8, nbest=8, longest=3)
    assert len(first) == 1 + 2 + 4 and len({h.tokens for h in first}) == 7


def test_extending_a_beam_by_hand():
    """Two open hypotheses and tokens 0, 1 (the end) and 2; a place is three times the hypothesis plus the token."""
    totals = torch.tensor([[[-5.0, -1.0, -2.0], [-3.0, -4.0, -6.0]]])
    done, places, open_, kept = extend_beam(totals, beam=2, eos=1)
    assert done.tolist() == [[-1.0, float("-inf")]] and places.tolist() == [[1, 2]]
    assert open_.tolist() == [[-2.0, -3.0]] and kept.tolist() == [[2, 3]]
    done, places, open_, kept = extend_beam(totals[:, :1], beam=3, eos=1)  # fewer continuations than twice the beam
    assert done.tolist() == [[-1.0, float("-inf"), float("-inf")]]
    assert open_.tolist() == [[-2.0, -5.0, float("-inf")]] and kept.tolist()[0][:2] == [2, 0]

"""Generated reviews: stars follow from all aspects, evidence is where it is said to be, one aspect is not enough."""

from collections import Counter

import pytest
import torch

from repulsive.lab.systems.classification.generated import (
    ASPECTS,
    NEGATED,
    NEGATIONS,
    OPINIONS,
    evidence_mask,
    generate,
    stars_of,
)
from repulsive.lab.text.tokens import tokenizer
from repulsive.metrics.classification import evidence_coverage

REVIEWS = generate(1500, seed=5)
SCORE_OF = {word: score for scores in OPINIONS.values() for score, words in scores.items() for word in words}


def test_an_opinion_word_has_one_meaning():
    words = [word for scores in OPINIONS.values() for group in scores.values() for word in group]
    assert len(words) == len(set(words)) == len(ASPECTS) * 4 * 5


def test_evidence_points_at_the_opinion_and_gives_its_score():
    kinds = Counter()
    for review in REVIEWS:
        assert set(review.evidence) == set(review.scores)
        for aspect, positions in review.evidence.items():
            words = [review.tokens[p] for p in positions]
            (opinion,) = (word for word in words if word not in NEGATIONS)
            negated = len(words) == 2
            assert any(opinion in group for group in OPINIONS[aspect].values())
            assert review.scores[aspect] == (NEGATED[SCORE_OF[opinion]] if negated else SCORE_OF[opinion])
            kinds["negated" if negated else "plain"] += 1
    assert 0.15 < kinds["negated"] / kinds.total() < 0.35


def test_words_outside_the_evidence_that_look_like_it_are_hearsay_that_says_the_opposite():
    decoys = 0
    for review in REVIEWS:
        known = {p for positions in review.evidence.values() for p in positions}
        for p, word in enumerate(review.tokens):
            if word in SCORE_OF and p not in known:
                (aspect,) = (a for a in ASPECTS if any(word in group for group in OPINIONS[a].values()))
                assert SCORE_OF[word] * review.scores[aspect] < 0
                decoys += 1
    assert decoys > len(REVIEWS) / 2


def test_stars_follow_from_the_aspects():
    for review in REVIEWS:
        heard = [*review.scores.values(), review.scores[review.priority], review.scores[review.priority]]
        mean = sum(heard) / len(heard)
        assert abs(review.stars - max(1, min(5, 3 + 2 * mean))) <= 0.5 + 1e-9
        assert 3 <= len(review.scores) <= 5
    pair = {"food": 2, "price": -1}
    assert [stars_of(pair, "food"), stars_of(pair, "price")] == [5, 3]  # 3 + 2 * 5/4 and 3 - 2 * 1/4, half up
    assert stars_of(dict.fromkeys(("food", "price", "place"), -2), "food") == 1


def test_the_priority_is_said_once_and_by_name():
    for review in REVIEWS:
        named = [p for p, word in enumerate(review.tokens) if word in ASPECTS]
        assert [review.tokens[p] for p in named] == [review.priority]
        assert review.priority in review.scores


def test_sentences_hold_their_evidence_and_end_with_a_full_stop():
    for review in REVIEWS:
        for aspect, (start, end) in review.sentences.items():
            assert all(start <= p < end for p in review.evidence[aspect])
            assert review.tokens[end - 1] == "." and "." not in review.tokens[start : end - 1]
            assert start == 0 or review.tokens[start - 1] == "."


def best_guess(pairs):
    """Accuracy of the best guess of y from x, over pairs (x, y)."""
    return sum(Counter(y for x, y in pairs if x == seen).most_common(1)[0][1] for seen in {x for x, _ in pairs}) / len(
        pairs
    )


def test_classes_are_balanced_and_no_shortcut_is_enough():
    counts = Counter(review.stars for review in REVIEWS)
    assert all(0.12 < counts[stars] / len(REVIEWS) < 0.30 for stars in range(1, 6))
    one = [(score, review.stars) for review in REVIEWS for score in review.scores.values()]
    assert best_guess(one) < 0.45  # some aspect
    assert (
        best_guess([(review.scores[review.priority], review.stars) for review in REVIEWS]) < 0.6
    )  # the priority alone
    average = [(sum(review.scores.values()) / len(review.scores), review.stars) for review in REVIEWS]
    assert best_guess(average) < 0.7  # all opinions, without knowing which counts three times


def test_the_same_seed_gives_the_same_reviews_and_another_does_not():
    assert generate(20, seed=5) == REVIEWS[:20]
    assert all(a != b for a, b in zip(generate(20, seed=6), REVIEWS, strict=False))


def test_size_of_texts_and_vocabulary():
    lengths = [len(review.tokens) for review in REVIEWS]
    assert 25 < sum(lengths) / len(lengths) < 90
    assert len({word for review in REVIEWS for word in review.tokens}) > 250
    assert len(generate(3, aspects=(6, 6), filler=0)[0].scores) == 6
    with pytest.raises(ValueError, match="aspects"):
        generate(1, aspects=(3, 7))


def test_text_splits_into_the_same_words():
    split = tokenizer("regex")
    assert all(split(review.text) == list(review.tokens) for review in REVIEWS[:300])


def test_coverage_of_perfect_and_of_collapsed_heads():
    reviews = REVIEWS[:50]
    length = max(len(review.tokens) for review in reviews)
    mask = evidence_mask(reviews, length)  # [B, K, T]
    assert mask.sum() == sum(len(p) for review in reviews for p in review.evidence.values())
    perfect = mask.double() / mask.sum(-1, keepdim=True).clamp(min=1)
    assert evidence_coverage(perfect, mask) == 1
    first = torch.stack([perfect[b, ASPECTS.index(next(iter(r.scores)))] for b, r in enumerate(reviews)])
    collapsed = first.unsqueeze(1).expand(-1, 6, -1)
    aspects = sum(len(review.scores) for review in reviews)
    assert evidence_coverage(collapsed, mask).item() == pytest.approx(len(reviews) / aspects)
    whole = evidence_mask(reviews, length, sentences=True)
    assert (mask <= whole).all() and whole.sum() > 4 * mask.sum()

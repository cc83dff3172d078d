"""Generated reviews: several aspects each, stars that depend on all of them, and known evidence.

    the waiter was attentive . everyone said the soup was bland , but it was superb . i care about price above all . ...

The opinion on each aspect is drawn independently. The stars follow from the mean opinion, in which the priority of the
writer counts three times. One aspect alone says little about the stars, and an average over opinions does not show
which one counts three times. A negation reverses an opinion; in a contrast, the first opinion is hearsay and does not
count.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.lab.text.evidence import MOST_ASPECTS, pack_word
from repulsive.lab.text.tokens import Ragged

SCORES = (-2, -1, 1, 2)
NEGATED = {-2: 1, -1: 1, 1: -1, 2: -1}  # "not superb" is a complaint, but a weaker one than "revolting"
NEGATIONS = ("not", "never", "hardly")
# Nouns for an aspect, then its opinion words for each of SCORES. No opinion word occurs twice.
_LEXICON = {
    "food": (
        "soup pasta steak fish curry salad bread dessert pizza risotto",
        "inedible disgusting rancid revolting vile",
        "bland soggy greasy dry stale",
        "tasty flavourful fresh juicy crisp",
        "delicious superb exquisite heavenly sublime",
    ),
    "service": (
        "waiter waitress hostess staff bartender manager server cashier crew chef",
        "rude hostile insulting contemptuous abusive",
        "slow inattentive forgetful grumpy careless",
        "friendly polite helpful prompt kind",
        "attentive gracious impeccable charming outstanding",
    ),
    "price": (
        "bill receipt menu cost check tab total fee charge offer",
        "outrageous extortionate exorbitant criminal ruinous",
        "expensive overpriced steep inflated costly",
        "fair reasonable affordable modest sensible",
        "unbeatable phenomenal generous incredible irresistible",
    ),
    "place": (
        "room terrace decor interior garden hall furniture music lighting balcony",
        "filthy squalid hideous unbearable stinking",
        "noisy cramped shabby dark dated",
        "cosy clean pleasant bright comfortable",
        "gorgeous stunning magical breathtaking enchanting",
    ),
    "drinks": (
        "wine beer coffee cocktail juice tea lemonade whisky espresso cider",
        "undrinkable poisonous foul putrid nauseating",
        "watery lukewarm flat bitter weak",
        "refreshing smooth fruity aromatic mellow",
        "divine velvety sensational glorious luscious",
    ),
    "location": (
        "parking neighbourhood street entrance view area access station corner harbour",
        "dangerous hopeless terrifying impossible nightmarish",
        "inconvenient remote awkward confusing dull",
        "handy central convenient quiet easy",
        "ideal perfect spectacular unrivalled picturesque",
    ),
}
ASPECTS = tuple(_LEXICON)
assert len(ASPECTS) <= MOST_ASPECTS
SUBJECTS = {aspect: tuple(words[0].split()) for aspect, words in _LEXICON.items()}
OPINIONS = {  # aspect -> score -> words
    aspect: {score: tuple(words.split()) for score, words in zip(SCORES, rest, strict=True)}
    for aspect, (_, *rest) in _LEXICON.items()
}
_PLAIN = ("the {x} was {o} .", "their {x} seemed {o} to me .", "{o} , that is the word for the {x} .")
_NEGATIVE = ("the {x} was {n} {o} .", "i would {n} call the {x} {o} .", "the {x} is {n} what i call {o} .")
_CONTRAST = (
    "everyone said the {x} was {d} , but it was {o} .",
    "i expected {d} things of the {x} , yet it was {o} .",
    "although the {x} used to be {d} , it is {o} now .",
)
_PRIORITY = ("i care about {a} above all .", "for me , {a} comes first .", "nothing matters to me like {a} .")
_FILLER = (
    "i came on a {day} with my {who} .",
    "my {who} and i live in {town} .",
    "it was {day} {time} and we had {count} people .",
    "we were in {town} for {count} days .",
    "my {who} ordered first , i ordered second .",
    "they opened {count} years ago , my {who} told me .",
    "this was our {time} stop on the way to {town} .",
    "on {day} they close at {count} .",
)
_BLANKS = {
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "who": "wife husband sister brother cousin boss friend neighbour mother father uncle aunt niece nephew teacher",
    "town": "boston chicago austin denver portland seattle phoenix memphis dallas tampa omaha reno tucson oakland",
    "time": "morning noon afternoon evening night lunch dinner breakfast",
    "count": "two three four five six seven eight nine ten eleven twelve twenty",
}


@dataclass(frozen=True)
class Review:
    """A generated review.

    Args:
        tokens: its words.
        stars: 1 to 5.
        scores: opinion on each aspect that it mentions, -2 to 2, in the order of the text.
        priority: the aspect that counts three times.
        evidence: by aspect, the positions of the opinion word and of its negation, if it has one.
        sentences: by aspect, the start and the end of the sentence about it.
    """

    tokens: tuple[str, ...]
    stars: int
    scores: dict[str, int]
    priority: str
    evidence: dict[str, tuple[int, ...]]
    sentences: dict[str, tuple[int, int]]

    @property
    def text(self) -> str:
        return " ".join(self.tokens)


def generate(count: int, seed: int = 0, *, aspects: tuple[int, int] = (3, 5), filler: int = 1) -> list[Review]:
    """Generate reviews.

    Args:
        count: number of reviews.
        seed: random seed; a larger `count` gives the same reviews first.
        aspects: minimum and maximum number of aspects in a review, up to 6.
        filler: maximum number of sentences without an opinion before each aspect.
    """
    fewest, most = aspects
    if not 1 <= fewest <= most <= len(ASPECTS):
        raise ValueError(f"aspects={aspects}: expected two numbers from 1 to {len(ASPECTS)}, in ascending order")
    return [_review(random.Random(f"{seed}/{i}"), fewest, most, filler) for i in range(count)]


def stars_of(scores: Mapping[str, int], priority: str) -> int:
    r"""Compute the stars, $\lfloor 3 + 2 \bar s + \frac12 \rfloor$ within 1 to 5.

    The mean $\bar s$ counts the priority three times. It is doubled so that all five ratings are about equally common.

    Example:
        >>> stars_of({"food": 1, "price": -2}, "food"), stars_of({"food": 1, "price": -2}, "price")
        (4, 1)
    """
    count = len(scores) + 2
    total = sum(scores.values()) + 2 * scores[priority]
    rounded = (4 * total + 7 * count) // (2 * count)  # integer arithmetic, which rounds halves up on any machine
    return min(5, max(1, rounded))


def evidence_mask(reviews: Sequence[Review], length: int, *, sentences: bool = False) -> Tensor:
    """Mark the evidence words of each aspect, in the form that `metrics.classification.evidence_coverage` takes.

    Args:
        reviews: the reviews.
        length: padded length.
        sentences: mark the whole sentence about an aspect. A recurrent encoder carries an opinion to nearby words, so
            that a head may read it there.

    Returns:
        bool [B, aspects, length].
    """
    mask = torch.zeros(len(reviews), len(ASPECTS), length, dtype=torch.bool)
    for row, review in enumerate(reviews):
        for column, aspect in enumerate(ASPECTS):
            if aspect in review.scores:
                positions = range(*review.sentences[aspect]) if sentences else review.evidence[aspect]
                mask[row, column, list(positions)] = True
    return mask


def pack_evidence(reviews: Sequence[Review], longest: int | None = None) -> Ragged:
    """Pack the evidence positions of reviews for a prepared folder; `text.evidence` describes the format.

    Args:
        reviews: the reviews.
        longest: maximum length of a review in words; None: unlimited. Evidence past it is dropped.
    """
    rows = []
    for review in reviews:
        row = []
        for aspect, (start, end) in review.sentences.items():
            for position in range(start, min(end, longest or end)):
                is_opinion = position in review.evidence[aspect]
                row.append(pack_word(ASPECTS.index(aspect), position, is_opinion))
        rows.append(row)
    return Ragged.from_rows(rows)


def _review(draw: random.Random, fewest: int, most: int, filler: int) -> Review:
    aspects = draw.sample(ASPECTS, draw.randint(fewest, most))
    priority, priority_index = draw.choice(aspects), draw.randint(0, len(aspects))
    statement = draw.choice(_PRIORITY).format(a=priority).split()
    tokens: list[str] = []
    scores: dict[str, int] = {}
    evidence: dict[str, tuple[int, ...]] = {}
    sentences: dict[str, tuple[int, int]] = {}
    for i, aspect in enumerate(aspects):
        tokens += statement if i == priority_index else []
        for _ in range(draw.randint(0, filler)):
            blanks = {name: draw.choice(words.split()) for name, words in _BLANKS.items()}
            tokens += draw.choice(_FILLER).format(**blanks).split()
        sentence, scores[aspect], positions = _opinion(draw, aspect)
        evidence[aspect] = tuple(len(tokens) + position for position in positions)
        sentences[aspect] = (len(tokens), len(tokens) + len(sentence))
        tokens += sentence
    tokens += statement if priority_index == len(aspects) else []
    return Review(tuple(tokens), stars_of(scores, priority), scores, priority, evidence, sentences)


def _opinion(draw: random.Random, aspect: str) -> tuple[list[str], int, list[int]]:
    """Draw a sentence about an aspect; return its words, its score and the positions of the evidence."""
    score = draw.choice(SCORES)
    kind = draw.choice((_PLAIN, _PLAIN, _NEGATIVE, _CONTRAST))
    hearsay = draw.choice([s for s in SCORES if (s > 0) != (score > 0)])  # of opposite sign
    filled = {
        "x": draw.choice(SUBJECTS[aspect]),
        "o": draw.choice(OPINIONS[aspect][score]),
        "d": draw.choice(OPINIONS[aspect][hearsay]),
        "n": draw.choice(NEGATIONS),
    }
    pattern = draw.choice(kind).split()
    positions = [i for i, slot in enumerate(pattern) if slot in ("{o}", "{n}")]
    return [slot.format(**filled) for slot in pattern], NEGATED[score] if kind is _NEGATIVE else score, positions

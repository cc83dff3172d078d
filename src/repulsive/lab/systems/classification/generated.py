"""Reviews made to order: several aspects each, stars that follow from all of them, and known evidence.

    the waiter was attentive . everyone said the soup was bland , but it was superb . i care about price above all . ...

Each aspect of a review gets an opinion of its own, drawn independently, and the stars follow from their mean, in which
the aspect the writer cares about counts three times. Whoever reads one aspect knows little of the stars, and an average
over opinions does not tell which counts three times. A negation turns an opinion around; in a contrast the first
opinion is hearsay and does not count.
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
NEGATED = {-2: 1, -1: 1, 1: -1, 2: -1}  # "not superb" is a complaint, but not as strong a one as "revolting"
NEGATIONS = ("not", "never", "hardly")
# What an aspect is spoken of by, then its opinion words for each of SCORES. No opinion word has two meanings.
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
    """A made review.

    Args:
        tokens: its words.
        stars: 1 to 5.
        scores: opinion on each aspect it speaks of, -2 to 2, in the order of speaking.
        priority: the aspect that counts three times.
        evidence: for the same aspects, the positions of the opinion word and of its negation where it has one.
        sentences: for the same aspects, where the sentence on it starts and where it ends.
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
    """Make reviews.

    Args:
        count: how many.
        seed: the same seed gives the same reviews, and more of them start with the same.
        aspects: fewest and most aspects of a review, up to 6.
        filler: most sentences without an opinion before each aspect.
    """
    fewest, most = aspects
    if not 1 <= fewest <= most <= len(ASPECTS):
        raise ValueError(f"aspects={aspects}: from 1 to {len(ASPECTS)} in rising order")
    return [_review(random.Random(f"{seed}/{i}"), fewest, most, filler) for i in range(count)]


def stars_of(scores: Mapping[str, int], priority: str) -> int:
    r"""$\lfloor 3 + 2 \bar s + \frac12 \rfloor$ within 1 to 5: the mean counts the priority three times.

    It is doubled so that all five are about as common.

    Example:
        >>> stars_of({"food": 1, "price": -2}, "food"), stars_of({"food": 1, "price": -2}, "price")
        (4, 1)
    """
    count = len(scores) + 2
    total = sum(scores.values()) + 2 * scores[priority]
    rounded = (4 * total + 7 * count) // (2 * count)  # in whole numbers: halves go up everywhere
    return min(5, max(1, rounded))


def evidence_mask(reviews: Sequence[Review], length: int, *, sentences: bool = False) -> Tensor:
    """Evidence as `metrics.classification.evidence_coverage` takes it: bool [B, aspects, length].

    Args:
        reviews: the reviews.
        length: words of the longest, or what they are padded to.
        sentences: mark the whole sentence on an aspect. A recurrent encoder carries an opinion on to its neighbours, so
            that a head may well read it there.
    """
    mask = torch.zeros(len(reviews), len(ASPECTS), length, dtype=torch.bool)
    for row, review in enumerate(reviews):
        for column, aspect in enumerate(ASPECTS):
            if aspect in review.scores:
                places = range(*review.sentences[aspect]) if sentences else review.evidence[aspect]
                mask[row, column, list(places)] = True
    return mask


def pack_evidence(reviews: Sequence[Review], longest: int | None = None) -> Ragged:
    """Pack the evidence of reviews for a prepared folder; `text.evidence` describes the form.

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
    priority, said_before = draw.choice(aspects), draw.randint(0, len(aspects))
    statement = draw.choice(_PRIORITY).format(a=priority).split()
    tokens: list[str] = []
    scores: dict[str, int] = {}
    evidence: dict[str, tuple[int, ...]] = {}
    sentences: dict[str, tuple[int, int]] = {}
    for place, aspect in enumerate(aspects):
        tokens += statement if place == said_before else []
        for _ in range(draw.randint(0, filler)):
            blanks = {name: draw.choice(words.split()) for name, words in _BLANKS.items()}
            tokens += draw.choice(_FILLER).format(**blanks).split()
        sentence, scores[aspect], places = _opinion(draw, aspect)
        evidence[aspect] = tuple(len(tokens) + p for p in places)
        sentences[aspect] = (len(tokens), len(tokens) + len(sentence))
        tokens += sentence
    tokens += statement if said_before == len(aspects) else []
    return Review(tuple(tokens), stars_of(scores, priority), scores, priority, evidence, sentences)


def _opinion(draw: random.Random, aspect: str) -> tuple[list[str], int, list[int]]:
    """A sentence on an aspect, its score, and where in the sentence the evidence is."""
    score = draw.choice(SCORES)
    kind = draw.choice((_PLAIN, _PLAIN, _NEGATIVE, _CONTRAST))
    told = draw.choice([s for s in SCORES if (s > 0) != (score > 0)])  # hearsay says the opposite
    filled = {
        "x": draw.choice(SUBJECTS[aspect]),
        "o": draw.choice(OPINIONS[aspect][score]),
        "d": draw.choice(OPINIONS[aspect][told]),
        "n": draw.choice(NEGATIONS),
    }
    pattern = draw.choice(kind).split()
    places = [place for place, slot in enumerate(pattern) if slot in ("{o}", "{n}")]
    return [slot.format(**filled) for slot in pattern], NEGATED[score] if kind is _NEGATIVE else score, places

"""Scores of generated texts, each checked by hand and against the package that papers use."""

import doctest
import math
import random
import sys

import pytest

from repulsive.errors import DataError
from repulsive.lab.systems.graphs import meteor
from repulsive.lab.systems.graphs import metrics as generation
from repulsive.lab.systems.graphs.meteor import NLTK, OFFICIAL, official_program
from repulsive.lab.systems.graphs.metrics import (
    bleu,
    caption_rouge,
    entity_coverage,
    repeated_clauses,
    rouge,
    score_texts,
)

WORDS = ("the", "a", "Cat", "dog", "sat", ",", "on", "mat", ".", "2-d", "x")


def made(seed, rows=20):
    """Texts with one to three references each, of few words, so that n-grams do meet."""
    draw = random.Random(seed)

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 14)))

    return [text() for _ in range(rows)], [[text() for _ in range(draw.randint(1, 3))] for _ in range(rows)]


def test_examples_are_true():
    result = doctest.testmod(generation)
    assert result.attempted > 0 == result.failed


def test_bleu_by_hand():
    # The cat the mat: 3 of 4 words (the reference has one "the"), 1 of 3 pairs; four words for five.
    one, two, three, four = bleu(["The cat the mat"], [["a cat sat on the"]])
    short = math.exp(1 - 5 / 4)
    assert one == pytest.approx(100 * short * 2 / 4) and two == 0 and three == four == 0
    one, two, three, four = bleu(["the cat sat on mats"], [["the cat sat on the mat"]])
    short = math.exp(1 - 6 / 5)
    assert one == pytest.approx(100 * short * 4 / 5)
    assert two == pytest.approx(100 * short * (4 / 5 * 3 / 4) ** 0.5)
    assert three == pytest.approx(100 * short * (4 / 5 * 3 / 4 * 2 / 3) ** (1 / 3))
    assert four == pytest.approx(100 * short * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_bleu_of_several_references():
    assert bleu(["a b c d"], [["x y z", "A B C D"]]) == pytest.approx([100] * 4)
    assert bleu(["a b"], [["a x", "y b"]])[0] == pytest.approx(100)  # each word in one of them
    assert bleu(["a a"], [["a x", "a y"]])[0] == pytest.approx(50)  # as often as one of them has it, not both
    assert bleu(["a b c"], [["a b", "a b c d"]])[0] == pytest.approx(100)  # equally near: the shorter counts
    assert bleu(["", "a"], [["x"], ["a"]])[0] == pytest.approx(100 * math.exp(1 - 2))
    assert bleu([""], [["a"]]) == [0] * 4


@pytest.mark.parametrize("seed", range(5))
def test_bleu_is_that_of_sacrebleu(seed):
    metrics = pytest.importorskip("sacrebleu.metrics")
    texts, references = made(seed)
    most = max(map(len, references))
    columns = [[some[i] if i < len(some) else None for some in references] for i in range(most)]
    for n, found in enumerate(bleu(texts, references), 1):
        oracle = metrics.BLEU(tokenize="none", smooth_method="none", lowercase=True, force=True, max_ngram_order=n)
        assert found == pytest.approx(oracle.corpus_score(texts, columns).score, abs=1e-9)


def test_rouge_by_hand():
    # the cat sat | the cat is on the mat: two words of three and of six; one pair of two and of five.
    text, reference = ["The cat sat"], [["the cat is on the mat"]]
    found = rouge(text, reference, "1")
    assert (found.precision, found.recall) == pytest.approx((100 * 2 / 3, 100 * 2 / 6))
    assert found.f == pytest.approx(100 * 2 * 2 / (3 + 6))
    assert rouge(text, reference, "2").f == pytest.approx(100 * 2 * 1 / (2 + 5))
    assert rouge(["cat on cat mat"], reference, "L").recall == pytest.approx(100 * 3 / 6)  # cat .. on .. mat
    assert rouge(["mat the cat"], reference, "L").precision == pytest.approx(100 * 2 / 3)
    p, r = 2 / 3, 2 / 6
    assert caption_rouge(text, reference) == pytest.approx(100 * 2.44 * p * r / (r + 1.44 * p))


def test_rouge_of_several_references_and_of_nothing():
    several = [["x", "the cat sat", "the cat"]]
    for name in ("1", "2", "L"):
        assert rouge(["the cat sat"], several, name).f == pytest.approx(100)
    assert rouge(["the cat sat", ""], [*several, ["x"]], "L").f == pytest.approx(50)
    p, r = 2 / 3, 1.0  # the captioning score takes the best of each from different references
    mixed = [["the cat", "the dog on a mat and sat"]]
    assert caption_rouge(["the cat sat"], mixed) == pytest.approx(100 * 2.44 * p * r / (r + 1.44 * p))
    assert caption_rouge([""], [["a"]]) == 0 and rouge(["a"], [["b"]], "1").f == 0
    assert rouge(["state-of-the-art"], [["State of the art !"]], "L").recall == 100  # split as rouge-score does


@pytest.mark.parametrize("seed", range(5))
def test_rouge_is_that_of_rouge_score(seed):
    package = pytest.importorskip("rouge_score.rouge_scorer")
    texts, references = made(seed)
    names = {"1": "rouge1", "2": "rouge2", "L": "rougeL"}
    scorer = package.RougeScorer(list(names.values()), use_stemmer=False)
    rows = [scorer.score_multi(some, text) for text, some in zip(texts, references, strict=True)]
    for name, theirs in names.items():
        assert rouge(texts, references, name).f == pytest.approx(
            100 * sum(r[theirs].fmeasure for r in rows) / len(rows)
        )


def test_captioning_rouge_is_that_of_the_captioning_package():
    package = pytest.importorskip("pycocoevalcap.rouge.rouge")
    texts, references = made(7)
    lower = [[text.lower() for text in some] for some in references]
    rows = [package.Rouge().calc_score([text.lower()], some) for text, some in zip(texts, lower, strict=True)]
    assert caption_rouge(texts, references) == pytest.approx(100 * sum(rows) / len(rows))


def test_bleu_is_that_of_the_captioning_package():
    package = pytest.importorskip("pycocoevalcap.bleu.bleu_scorer")
    texts, references = made(8, rows=400)
    scorer = package.BleuScorer(n=4)
    for text, some in zip(texts, references, strict=True):
        scorer += (text.lower(), [reference.lower() for reference in some])
    oracle, _ = scorer.compute_score(option="closest", verbose=0)
    found = bleu(texts, references)
    assert found == pytest.approx([100 * score for score in oracle], rel=1e-6) and found[3] > 0


def test_coverage_by_hand():
    texts = ["we use Beam Search for parsing .", "a tree"]
    entities = [["beam search", "parsing", "treebank", "pars"], ["trees", "a", "A", ""]]
    assert entity_coverage(texts, entities) == pytest.approx(100 * 3 / 6)  # "A" and "a" are one, "" is none
    assert entity_coverage(["a"], [[]]) == 0


def test_repeated_clauses_by_hand():
    text = "we win , we win ; we lose and We win . so we lose"
    assert repeated_clauses([text]) == pytest.approx(100 * 3 / 5)
    assert repeated_clauses([text, "we win"]) == pytest.approx(100 * 3 / 6)  # another text is no repetition
    assert repeated_clauses([" . , and"]) == 0


def test_all_scores_together(monkeypatch):
    monkeypatch.setattr(meteor, "official_program", lambda: None)
    monkeypatch.setattr(meteor, "_nltk", lambda *_: None)
    texts, references = ["the cat sat on the mat ."], [["the cat sat on the mat .", "x"]]
    found = score_texts(texts, references, [["cat", "dog"]])
    assert list(found) == [
        "BLEU-1",
        "BLEU-2",
        "BLEU-3",
        "BLEU-4",
        "ROUGE-1",
        "ROUGE-2",
        "ROUGE-L",
        "ROUGE-L (caption)",
        "entity coverage",
        "repeated clauses",
    ]
    assert list(found.values()) == pytest.approx([100] * 8 + [50, 0])
    assert "entity coverage" not in score_texts(texts, references)


@pytest.mark.parametrize("score", [bleu, rouge, caption_rouge, entity_coverage, meteor.meteor])
def test_numbers_of_texts_must_agree(score):
    for texts, others in ((["a"], [["a"], ["b"]]), ([], [])):
        with pytest.raises(DataError, match=r"texts for \d lists of"):
            score(texts, others)


def test_other_mistakes():
    with pytest.raises(DataError, match="text 1 has no reference"):
        bleu(["a", "b"], [["a"], []])
    with pytest.raises(DataError, match="a list of lists of references, not a single text"):
        bleu(["a"], ["a"])
    with pytest.raises(DataError, match="not a single text"):
        rouge("a", [["a"]])
    with pytest.raises(DataError, match="ROUGE-3: choose 1, 2 or L"):
        rouge(["a"], [["a"]], "3")
    with pytest.raises(DataError, match="METEOR 'x' is unknown"):
        meteor.meteor(["a"], [["a"]], "x")


needs_meteor = pytest.mark.skipif(official_program() is None, reason="needs Java and pycocoevalcap")


@pytest.mark.slow
@needs_meteor
def test_the_official_meteor():
    found = meteor.meteor(["The cat sat on the mat", "a b c"], [["x", "the cat sat on the mat"], ["a b c"]])
    assert found is not None and found.name == OFFICIAL and found.value == pytest.approx(100)
    empty = meteor.meteor(["", "||| a"], [["the cat"], ["dogs"]], OFFICIAL)
    assert empty is not None and empty.value == pytest.approx(0, abs=1e-9)
    assert OFFICIAL in score_texts(["a cat"], [["a cat"]])


@pytest.mark.slow
@needs_meteor
def test_the_official_meteor_is_that_of_the_captioning_package():
    package = pytest.importorskip("pycocoevalcap.meteor.meteor")
    texts, references = made(3)
    lower = [text.lower() for text in texts], [[text.lower() for text in some] for some in references]
    oracle, _ = package.Meteor().compute_score(
        dict(enumerate(lower[1])), {i: [text] for i, text in enumerate(lower[0])}
    )
    found = meteor.meteor(texts, references)
    assert found is not None and found.value == pytest.approx(100 * oracle)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no memory')", "METEOR 1.5 failed: no memory"),
        ("print('not a number', flush=True); input(); input(); print('x\\ny', flush=True)", "METEOR 1.5 failed: "),
        ("pass", "METEOR 1.5 failed: it said nothing"),
    ],
)
def test_a_meteor_that_fails_is_no_score(monkeypatch, code, message):
    monkeypatch.setattr(meteor, "official_program", lambda: [sys.executable, "-c", code])
    with pytest.raises(DataError, match=message):
        meteor.meteor(["a"], [["a"]])
    with pytest.warns(UserWarning, match=f"{message}.*; it is left out"):
        found = score_texts(["a"], [["a"]])
    assert found["BLEU-1"] == 100 and not any("METEOR" in name for name in found)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap", None)
    for name in ("nltk", "nltk.corpus", "nltk.translate.meteor_score"):
        monkeypatch.setitem(sys.modules, name, None)
    assert official_program() is None and meteor.meteor(["a"], [["a"]]) is None
    with pytest.raises(DataError, match=r"METEOR 1\.5 needs Java and the package pycocoevalcap: python -m pip install"):
        meteor.meteor(["a"], [["a"]], OFFICIAL)
    with pytest.raises(DataError, match="needs nltk and its WordNet: pip install nltk"):
        meteor.meteor(["a"], [["a"]], NLTK)
    monkeypatch.undo()
    monkeypatch.setattr(meteor.shutil, "which", lambda name: None)  # no Java
    assert official_program() is None


def test_nltk_is_used_where_wordnet_is():
    package = pytest.importorskip("nltk.translate.meteor_score")
    try:
        oracle = package.meteor_score([["a", "cat"], ["dogs"]], ["the", "cat"])
    except (LookupError, OSError):
        pytest.skip("no WordNet")
    found = meteor.meteor(["The cat"], [["a cat", "dogs"]], NLTK)
    assert found is not None and found.name == NLTK and found.value == pytest.approx(100 * oracle)

"""Tokenizers, vocabulary and ragged sentences."""

import doctest
import sys

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.systems.classification import generated
from repulsive.lab.text import batches, lines, tokens
from repulsive.lab.text.tokens import PAD, UNK, Vocabulary, tokenizer
from repulsive.metrics import compare

SENTENCES = [["b", "a", "b"], ["c", "a", "b", "<pad>"], [], ["d"]]


@pytest.mark.parametrize("module", [batches, generated, lines, tokens, compare], ids=lambda m: m.__name__)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I can't say it's bad.", ["I", "ca", "n't", "say", "it", "'s", "bad", "."]),
        ("We’ll pay $12.50 -- OK?!", ["We", "’ll", "pay", "$", "12.50", "-", "-", "OK", "?", "!"]),
        ("@you saw #this https://a.b/c?d=1 today", ["@you", "saw", "#this", "https://a.b/c?d=1", "today"]),
        ("naïve  café\n", ["naïve", "café"]),
        ("", []),
    ],
)
def test_regex_words(text, words):
    assert tokenizer("regex")(text) == words
    assert tokenizer("regex", lowercase=True)(text) == [word.lower() for word in words]


def test_spacy_words():
    pytest.importorskip("spacy")
    assert tokenizer("spacy")("I don't like it,  OK?") == ["I", "do", "n't", "like", "it", ",", "OK", "?"]


def test_a_tokenizer_is_never_replaced_silently(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"pip install -e '\.\[classification\]'"):
        tokenizer("spacy")
    with pytest.raises(DataError, match="'nltk' is unknown"):
        tokenizer("nltk")


def test_vocabulary_order_cut_and_reserved_words():
    vocabulary = Vocabulary.build(SENTENCES)
    assert vocabulary.words == ("<pad>", "<unk>", "b", "a", "c", "d")
    assert Vocabulary.build(reversed(SENTENCES)) == vocabulary
    assert Vocabulary.build(SENTENCES, minimum=2).words == ("<pad>", "<unk>", "b", "a")
    assert Vocabulary.build(SENTENCES, most=3).words == ("<pad>", "<unk>", "b")
    with pytest.raises(DataError, match="starts with"):
        Vocabulary(("a", "b"))
    with pytest.raises(DataError, match="contains a word twice"):
        Vocabulary(("<pad>", "<unk>", "a", "a"))


def test_encoding():
    found = Vocabulary.build(SENTENCES, minimum=2).encode(SENTENCES)
    assert found.values.dtype == torch.int32
    assert found.values.tolist() == [2, 3, 2, UNK, 3, 2, UNK, UNK]  # a spelt-out <pad> is unknown, never padding
    assert found.offsets.tolist() == [0, 3, 7, 7, 8]
    assert found.lengths.tolist() == [3, 4, 0, 1] and len(found) == 4
    assert found[1].tolist() == [UNK, 3, 2, UNK] and found[-1].tolist() == [UNK] and found[2].tolist() == []
    assert Vocabulary.build(SENTENCES).encode(SENTENCES, longest=2).lengths.tolist() == [2, 2, 0, 1]
    assert Vocabulary.build(SENTENCES).encode([[], []]).lengths.tolist() == [0, 0]
    with pytest.raises(IndexError, match="sentence 4 is out of range for 4"):
        found[4]


def test_padding():
    found = Vocabulary.build(SENTENCES, minimum=2).encode(SENTENCES)
    table, lengths = found.padded(torch.tensor([3, 0, 2]))
    assert table.tolist() == [[UNK, PAD, PAD], [2, 3, 2], [PAD, PAD, PAD]] and lengths.tolist() == [1, 3, 0]
    assert found.padded(torch.tensor([3]), 4)[0].tolist() == [[UNK, PAD, PAD, PAD]]
    assert found.padded(torch.tensor([2]))[0].tolist() == [[PAD]]
    with pytest.raises(ValueError, match="too short for a sentence of 4"):
        found.padded(torch.tensor([1]), 3)

"""GloVe files: the right vector for each word, and clear errors."""

import gzip
import lzma

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.text.glove import read_glove

WORDS = ("<pad>", "<unk>", "the", "The", "Boston", "zyx", ".")
FILE = "the 1 2\n. 3 4\n. . . 9 9\nboston 5 6\nother 7 8\nThe -1 -2\n"


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_vectors_of_a_vocabulary(tmp_path, pack):
    path = tmp_path / "v.txt"
    path.write_bytes(pack(FILE.encode()))
    found = read_glove(path, WORDS, 2)
    assert found.table[[0, 2, 3, 4, 6]].tolist() == [[0, 0], [1, 2], [-1, -2], [5, 6], [3, 4]]
    assert found.found.tolist() == [False, False, True, True, True, False, True]
    assert found.coverage == 4 / 5
    assert found.coverage_of(torch.tensor([[2, 5, 0], [1, 4, 6]])) == 3 / 5
    assert found.table.isfinite().all() and (found.table[[1, 5]] != 0).all()


def test_an_exact_word_wins_wherever_it_stands(tmp_path):
    for text in ("the 1\nThe 2\n", "The 2\nthe 1\n"):
        assert read_glove(write(tmp_path / "v.txt", text), WORDS[:4]).table[2:].tolist() == [[1], [2]]


def test_unknown_words_are_like_the_others_and_the_seed_decides(tmp_path):
    words = ["<pad>", "<unk>", *(f"w{i}" for i in range(200)), *(f"x{i}" for i in range(800))]
    path = write(tmp_path / "v.txt", "".join(f"w{i} {5 + i % 2} {-i % 3}\n" for i in range(200)))
    table = read_glove(path, words, seed=1).table
    known, new = table[2:202], table[202:]
    assert torch.allclose(new.mean(0), known.mean(0), atol=0.1) and torch.allclose(new.std(0), known.std(0), atol=0.1)
    assert torch.equal(read_glove(path, words, seed=1).table, table)
    assert not torch.equal(read_glove(path, words, seed=2).table, table)


def test_a_word2vec_header_is_passed_over(tmp_path):
    assert read_glove(write(tmp_path / "v.txt", "2 3\nthe 1 2 3\nThe 4 5 6\n"), WORDS).table.shape == (7, 3)


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        (FILE, 3, "line 1: 2 numbers after the word, expected 3"),
        (FILE, 1, "line 1: 2 numbers after the word, expected 1"),
        ("the 1 2\nThe 3\n", None, "line 2: 1 numbers after the word, expected 2"),
        ("the 1 two\n", None, "line 1: could not convert string to float: 'two'"),
        ("the 1 nan\n", None, "line 1: a vector with infinite or NaN values"),
        ("", None, "empty file"),
        ("just\nwords\n", None, "line 1: 0 numbers"),
        ("other 1 2\n", None, "has none of the 5 words"),
    ],
)
def test_errors(tmp_path, text, size, message):
    with pytest.raises(DataError, match=rf"v\.txt.*{message}"):
        read_glove(write(tmp_path / "v.txt", text), WORDS, size)

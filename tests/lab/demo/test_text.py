"""The text of the demo: prose, each paragraph once, and held-out blocks that training never sees."""

import pytest

from repulsive.errors import DataError
from repulsive.lab.demo import text
from tests.lab.demo.small import small_text


def test_paragraphs_are_prose_only():
    given = (
        "Return the number of items in a container, counting\n"
        "    each of them once, even if they are equal to others.\n\n"
        "Too short to keep.\n\n"
        "this one starts in the middle of a sentence, so it is probably a fragment of a list of some kind.\n\n"
        ">>> print('A session in which a user types many characters, to be longer than the limit.')\n\n"
        "A paragraph about the naïve method, whose letters are not all in the range of ASCII, is left out too.\n"
    )
    assert list(text._paragraphs(given)) == [
        "Return the number of items in a container, counting each of them once, even if they are equal to others."
    ]


def test_training_and_held_out_text_have_no_paragraph_in_common():
    whole = small_text()
    paragraphs = [f"{number} {line}" for number, line in enumerate(whole.splitlines(keepends=True))]
    train, held_out = text.split("".join(paragraphs))
    parts = [bytes(part.tolist()).decode() for part in (train, held_out)]
    lines = [part.splitlines(keepends=True) for part in parts]
    assert sorted(lines[0] + lines[1]) == sorted(paragraphs)
    assert not set(lines[0]) & set(lines[1])
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.15


def test_sentences_come_from_the_held_out_text():
    whole = small_text()
    held_out = bytes(text.split(whole)[1].tolist()).decode()
    chosen = text.sentences(whole, 5)
    assert len(chosen) == len(set(chosen)) == 5
    assert all(each in held_out and 36 <= len(each) <= 48 for each in chosen)
    with pytest.raises(DataError, match="no sentence of 4 to 5"):
        text.sentences(whole, 5, shortest=4, longest=5)


@pytest.mark.slow
def test_python_documents_itself():
    """The real source: every line is a paragraph of prose, and no paragraph occurs twice."""
    whole = text.documentation()
    lines = whole.splitlines()
    assert len(lines) == len(set(lines)) > 1_000
    assert whole.isascii() and max(whole.encode()) < text.VOCABULARY
    assert len(text.sentences(whole, 12)) == 12


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_prose", lambda folder: iter(["One paragraph."]))
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"expected 200,000 bytes.*got 15; use a Python with its sources"):
        text.documentation()

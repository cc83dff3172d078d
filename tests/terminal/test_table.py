"""Tables at a terminal and in a file, numbers with three digits, and JSON documents."""

import io
import json
import math
from pathlib import Path

import pytest

from repulsive.terminal.document import as_document, finite
from repulsive.terminal.table import MarkdownText, Table, render, signed, three_digits

TABLE = Table(
    ["method", "accuracy", "note"],
    [["MA", "0.873 ± 0.012", "plain"], ["a label of several words " * 3, "+0.012 (p 0.030)", "x" * 60]],
    "Results",
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8731, "0.873"),
        (0.9996, "1.00"),
        (1.005, "1.00"),
        (9.996, "10.0"),
        (27.31, "27.3"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (0.0, "0.000"),
        (-0.25, "-0.250"),
        (0.0005, "0.001"),
        (0.00042, "4.2e-04"),
        (math.nan, "n/a"),
        (math.inf, "n/a"),
        (None, "n/a"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert three_digits(value) == text


def test_differences_have_a_sign():
    assert [signed(value) for value in (0.5, -0.5, 0.0, math.nan)] == ["+0.500", "-0.500", "+0.000", "n/a"]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_table_fits_the_terminal_and_loses_nothing(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = render([TABLE, "A sentence of many words. " * 8], io.StringIO())
    assert max(map(len, text.splitlines())) <= columns
    letters = "".join(text.split())
    assert letters.count("x") == 60 and "0.873±0.012" in letters and "…" not in text


def test_a_file_gets_whole_lines(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = render([TABLE, "below " * 40], io.StringIO()).splitlines()
    assert lines[0] == "Results" and len(lines) == 6 and "x" * 60 in lines[3]
    assert all(line == line.rstrip() for line in lines) and "\x1b" not in "".join(lines)
    assert lines[2].index("0.873 ± 0.012") + 13 == lines[3].index("0.030)") + 6  # numbers are aligned to the right
    assert lines[1].index("note") == lines[2].index("plain") == lines[3].index("x" * 60)


def test_tables_can_share_widths(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = render(
        [Table(["a", "b"], [["1", "word"]], widths=[9]), Table(["a", "b"], [["longer ab", "w"]])], io.StringIO()
    )
    assert [line.find("w") for line in text.splitlines() if "w" in line] == [11, 11]


def test_text_from_users_cannot_control_the_terminal_or_add_styles():
    nasty = "a\x1b[2J[bold]b[/bold]\u202e"
    text = render([Table([nasty], [[nasty]], nasty), nasty, MarkdownText(nasty)], io.StringIO())
    assert not set("\x1b\u202e") & set(text) and text.count("[bold]b[/bold]") == 5


def test_markdown_is_rendered(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = render([MarkdownText("**bold** text\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n")], io.StringIO())
    assert "bold text" in text and "|" not in text and "**" not in text and "---" not in text


def test_markdown_in_a_file_has_lines_of_ordinary_length(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = render([MarkdownText("# Title\n\n---\n\nwords")], io.StringIO())
    assert "Title" in text and max(map(len, text.splitlines())) <= 100


def test_a_row_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="expected 2 cells"):
        render([Table(["a", "b"], [["1", "2"], ["1"]])], io.StringIO())


def test_documents_are_strict_json():
    value = {"a": [math.nan, 1.5, (math.inf, None)], "path": Path("x") / "y", "text": "é\u202e"}
    assert json.loads(as_document(value)) == {"a": [None, 1.5, [None, None]], "path": "x/y", "text": "é\u202e"}
    assert as_document(value).isascii() and finite(True) is True

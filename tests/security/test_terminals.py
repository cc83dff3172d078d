"""Escape sequences and markup in data, recipes and names are printed as text."""

import ast
import io
import json
import warnings
from pathlib import Path

import pytest

from repulsive.cli.app import run
from repulsive.lab.engine.launch import _warnings_as_lines
from repulsive.lab.engine.progress import Log
from repulsive.lab.engine.tables import Cell, Row
from repulsive.lab.engine.tables import as_markdown as as_table
from repulsive.lab.judge.answers import Answers
from repulsive.lab.judge.key import Key
from repulsive.lab.judge.tally import as_markdown, tally
from repulsive.safety.markdown import escaped
from repulsive.safety.terminal import one_line, printable
from tests.lab.engine import tiny

CLI = Path(__file__).resolve().parents[2] / "src" / "repulsive" / "cli"
TITLE = "\x1b]0;owned\x07"  # sets the title of the terminal
CLEAR = "\x1b[2J\x9b31m"
BIDI = "\u202egnp.exe\u2066"
NASTY = f"a{TITLE}{CLEAR}{BIDI}\x00\x08\u2028\ud800b"
CONTROLS = "\x1b\x07\x9b\u202e\u2066\x00\x08\u2028\ud800"


def clean(text):
    return not set(text) & set(CONTROLS)


def test_control_characters_are_escaped():
    assert clean(printable(NASTY)) and clean(one_line(NASTY + "\r\n" + NASTY))
    assert printable("\x1b[1m\u202e\U000e0001") == "\\x1b[1m\\u202e\\U000e0001"
    assert "\n" not in one_line("a\nb\r\nc") and printable("a\n\tb") == "a\n\tb"


@pytest.mark.parametrize("text", ["Größe 3 % ± 0,1", "日本語", "naïve — “x”", "👩\u200d🚀", "\u0915\u094d\u200d\u0937"])
def test_ordinary_text_is_unchanged(text):
    assert printable(text) == text


@pytest.mark.parametrize("name", sorted(path.name for path in CLI.glob("*.py")))
def test_commands_print_in_one_place(name):
    if name in ("output.py", "__init__.py"):
        return
    for node in ast.walk(ast.parse((CLI / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            allowed = "context.get_help" in ast.unparse(node) or "__version__" in ast.unparse(node)
            assert allowed or called not in ("print", "typer.echo", "typer.secho"), f"{name}:{node.lineno}"


@pytest.mark.parametrize(
    "words", [["train", NASTY], ["heads", NASTY], ["ls", "--out", "x\x1b[2J"], [NASTY], ["--" + NASTY]]
)
def test_errors_on_the_command_line_are_escaped(capsys, words):
    words = [word.replace("\ud800", "").replace("\x00", "") for word in words]
    run(words)
    printed = capsys.readouterr()
    assert clean(printed.out) and clean(printed.err)


def test_a_recipe_with_escape_sequences(tmp_path, capsys):
    path = tmp_path / "x.toml"
    path.write_text('task = "classification"\nlabel = "\\u001b]0;owned\\u0007"\n"\\u001b[2J" = 3\n')
    assert run(["train", str(path)]) == 2
    assert clean(capsys.readouterr().err)


def test_a_label_with_escape_sequences(tmp_path, capsys):
    data = tiny.make_data(tmp_path / "prepared")
    text = tiny.toml(data).read_text().replace('label = "tiny"', 'label = "\\u001b[2J | **bold** \\u202e"')
    tiny.toml(data).write_text(text)
    assert run([*tiny.words(data, tmp_path / "out", "training.epochs=1"), "--quiet"]) == 0
    assert run([*tiny.words(data, tmp_path / "out", "training.epochs=1"), "--quiet", "--markdown"]) == 0
    assert run(["ls", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "[2J | **bold** " in printed.out.splitlines()[1]  # a table for a terminal shows the label as it is
    assert clean(printed.out) and clean(printed.err) and "\\x1b" in printed.out and r"\| \*\*bold\*\*" in printed.out


def test_data_with_escape_sequences(tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("".join(f"\x1b]0;owned\x07{i % 2}\ta good text {i}\n" for i in range(30)))
    for part in ("dev", "test"):
        (tmp_path / f"{part}.tsv").write_text((tmp_path / "train.tsv").read_text())
    words = ["prepare", "tsv", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--tokenizer", "regex"]
    assert run([*words, "--no-header", "--label", "0", "--text", "1"]) in (0, 2)
    printed = capsys.readouterr()
    assert clean(printed.out) and clean(printed.err) and "x1b" in printed.out + printed.err


def test_warnings_and_logs_are_clean(capsys):
    with _warnings_as_lines(None):
        warnings.warn(NASTY.replace("\ud800", ""), stacklevel=1)
    assert clean(capsys.readouterr().err)
    file = io.StringIO()
    Log(file, [f"x{CLEAR}"]).finished({"test": {f"x{CLEAR}": 1.0}, "best_step": 1})
    assert clean(file.getvalue())


JUDGE = "**Ann** | <img src=x onerror=alert(1)> [x](javascript:1) `y` https://evil.example\n\n# big"


def test_names_of_judges_cannot_add_markup():
    key = Key(page="p", title="t", salt="", seal="s", seed=0, systems=("A|*x*", "<b>B"), ids=["1"], sides=["left"])
    found = tally(key, [Answers(JUDGE, {1: {"overall": "left"}})], resamples=10)
    text = as_markdown(found)
    head = text.splitlines()[0]
    assert json.dumps(JUDGE)[1:9] not in text and r"\*\*Ann\*\* \| \<img" in head
    assert r"\[x\]" in head and r"https\://" in head and "\\`y\\`" in head and r"A\|\*x\*" in head
    assert len({line.count("|") - line.count("\\|") for line in text.splitlines()[2:5]}) == 1


def test_labels_of_a_table_cannot_add_markup(tmp_path):
    rows = [Row(label, tmp_path, (0,), {"accuracy": Cell(1.0, float("nan"))}, {}) for label in ("MA", "a | b\n| c")]
    lines = as_table(rows).splitlines()
    assert len(lines) == 4 and lines[-1] == r"| a \| b \| c | 1 | 1.0000 |"


@pytest.mark.parametrize("text", ["MA + SVGD", "svgd_small (3)", "1.5 %", "Müller-Lüdenscheidt", "a & b", "seed-0: x"])
def test_ordinary_names_are_unchanged(text):
    assert escaped(text) == text

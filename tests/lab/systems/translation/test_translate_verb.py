"""`repulsive translate`: a filter keeps lines and their order, and a mistake is one line."""

import io
import subprocess
import sys

import pytest

from repulsive.cli.app import run
from repulsive.lab.systems.translation.prepare import MOST_PIECES
from tests.lab.engine import tiny
from tests.lab.systems.translation import digits

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
LINES = ["Eins zwei drei.", "", "Sieben sieben.", "   ", "Null.", "漢字", "vier fünf sechs sieben acht neun eins ."]
TEXT = "".join(f"{line}\n" for line in LINES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = digits.make_data(tmp_path_factory.mktemp("digits"))
    changes = ("training.epochs=20", "training.batch=256", "model.dropout=0")
    digits.train(folder, folder / "run" / "seed-0", *changes)
    return folder


@pytest.fixture
def translate(trained, monkeypatch, capfd):
    def call(*words, text=TEXT, where="run"):
        raw = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code = run(["translate", str(trained / where), "--device", "cpu", *words])
        return (code, *capfd.readouterr())

    return call


def test_as_many_lines_and_in_their_order(translate):
    code, out, err = translate()
    lines = out.split("\n")
    assert (code, err) == (0, "") and len(lines) == len(LINES) + 1 and lines[-1] == ""
    assert [bool(line) for line in lines[:-1]] == [True, False, True, False, True, True, True]
    assert lines[0] == "one two three." and lines[2] == "seven seven."


def test_batches_and_line_ends_change_nothing(translate):
    whole = translate()[1]
    for size in ("1", "2", "3"):
        assert translate("--batch", size)[1] == whole
    assert translate("--batch", "2", text="\r\n".join(LINES))[1] == whole  # no end to the last line
    assert translate(text="")[1] == "" and translate(text="\n\n")[1] == "\n\n"
    assert translate(where="run/seed-0")[1] == whole
    assert translate(text="\ufeff" + TEXT)[1] == whole


def test_the_best_and_the_next(translate):
    code, out, _ = translate("--beam", "4", "--nbest", "3", "--lenpen", "0.5")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and all(len(row) == 3 for row in rows)
    numbers = [int(row[0]) for row in rows]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, len(LINES) + 1))
    assert numbers.count(1) == 3 and numbers.count(2) == 1 and rows[numbers.index(2)] == ["2", "0.0000", ""]
    scores = [float(score) for number, score, _ in rows if number == "1"]
    assert scores == sorted(scores, reverse=True) and len({text for number, _, text in rows if number == "1"}) == 3
    assert translate("--beam", "4", "--lenpen", "0.5")[1].splitlines()[0] == rows[0][2]


def test_a_line_too_long_is_cut_and_told(translate):
    code, out, err = translate("--beam", "1", text="\n" + "eins " * (MOST_PIECES + 50))
    assert code == 0 and out.count("\n") == 2 and out.startswith("\n")
    assert err == f"repulsive: line 2: cut after {MOST_PIECES} pieces\n"


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        (["--beam", "0"], {}, "beam=0 must be at least 1"),
        (["--nbest", "9"], {}, "nbest=9: at least 1, and at most the beam, 2"),
        (["--lenpen", "-1"], {}, "lenpen=-1.0 must not be negative"),
        (["--lenpen", "nan"], {}, "lenpen=nan must not be negative, and a finite number"),
        (["--batch", "0"], {}, "'--batch'"),
        (["--device", "tpu"], {}, "choose cpu or cuda"),
        ([], {"where": "nowhere"}, "is not a run folder"),
        ([], {"text": b"eins\n\xff\n"}, "line 2 of the input: byte 0 is not UTF-8"),
    ],
)
def test_a_mistake_is_one_line(words, options, expected, translate):
    code, _, err = translate(*words, **options)
    assert code == 2 and err.count("\n") == 1 and expected in err


def test_a_run_of_another_task_or_of_many_seeds(trained, translate, tmp_path):
    tiny.train(tiny.make_data(tmp_path / "reviews"), trained / "other" / "seed-0", "training.epochs=1")
    assert "is a run of classification, not of translation" in translate(where="other")[2]
    digits.train(trained, trained / "two" / "seed-0", "training.epochs=1")
    digits.train(trained, trained / "two" / "seed-1", "training.epochs=1", "seed=1")
    assert "has seeds 0, 1: name one of their folders" in translate(where="two")[2]


def test_in_a_pipe_that_closes(trained):
    """`translate | head -1`: no traceback, no complaint."""
    words = tiny.command("translate", str(trained / "run"), "--batch", "1", "--device", "cpu")
    process = subprocess.Popen(
        words, env=tiny.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdin.write(b"eins zwei .\n" * 200)
    process.stdin.close()
    first = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert first == b"one two.\n" and errors == b"" and process.wait() == 0

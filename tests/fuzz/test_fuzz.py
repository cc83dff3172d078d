"""Damaged files: every reader refuses them with an error of ours, in time, and leaves everything as it was.

The quick set has a few hundred cases, the nightly one ten thousand; `python -m tests.fuzz` runs any others by hand.
"""

import json
import threading
from dataclasses import replace

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import ConfigError, DataError, RunError
from repulsive.lab.engine.recipe_tables import parse_value
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.graphs.mentions import find_mentions, forms
from repulsive.lab.text.lines import BadLines, read_json, read_lines
from repulsive.lab.text.pieces import learn
from tests.fuzz import harness
from tests.fuzz.damage import DEEP, LONG
from tests.fuzz.harness import WORKED, Samples, attempt
from tests.fuzz.raw_files import write_tsv
from tests.fuzz.readers import SUBJECTS

QUICK = 9  # cases of every reader
NIGHTLY = 280
FIRST = 10_000  # seed of the nightly ones


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    return Samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attempts(subject, seeds, samples, folder):
    """How the cases ended, every fourth of them through the command line."""
    failed, ended = [], []
    for seed in seeds:
        try:
            ended.append(attempt(subject, seed, samples, folder / str(seed), by_words=seed % 4 == 3))
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n\n".join([f"{len(failed)} of {len(seeds)} cases failed", *failed[:5]])
    return ended


def test_there_are_enough_cases():
    assert len(SUBJECTS) == len({subject.name for subject in SUBJECTS})
    assert QUICK * len(SUBJECTS) >= 300
    assert NIGHTLY * len(SUBJECTS) >= 10_000


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_damaged_files(subject, samples, tmp_path):
    attempts(subject, range(QUICK), samples, tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_many_damaged_files(subject, samples, tmp_path):
    ended = attempts(subject, range(FIRST, FIRST + NIGHTLY), samples, tmp_path)
    assert ended.count(WORKED) < len(ended) or subject.name == "changes", "the damage does nothing"


# -- faults that were found this way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ['{"a": ' + LONG + "}", "[" * DEEP, '{"a":' * DEEP], ids=["number", "list", "object"])
def test_json_that_nobody_can_read_is_a_bad_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line + '\n{"b": "\\ud800"}\n')
    bad = BadLines("a.jsonl")
    assert [value for _, value in read_json(tmp_path / "a.jsonl", bad)] == [{"b": "?"}] and bad.count == 1


def test_numbers_that_nobody_writes_out_have_no_other_forms():
    assert forms("1e99999999999") == ["1e99999999999"] and forms(f"1e{LONG}") == [f"1e{LONG}"]
    assert forms("2e3") == ["2e3", "2000", "2,000"]
    assert find_mentions("It weighs 2,000.", ["2e3"]) == [(10, 15, 0)]


def test_a_word_without_end_is_not_learned():
    vocabulary, _ = learn([["ab", "ab", "(" * DEEP]], 30, 1)
    assert "ab" in "".join(vocabulary.words) and not [word for word in vocabulary.words if "((" in word]


@pytest.mark.parametrize("text", [LONG, "[" * DEEP, "1\nother = 2"])
def test_a_value_that_is_no_toml_is_a_word(text):
    assert parse_value(text) == text


def test_a_file_behind_a_loop_of_links(tmp_path):
    (tmp_path / "a.txt").symlink_to("a.txt")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_lines(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("file", "told", "message"),
    [
        ("recipe.json", {"seed": "x"}, "its seed is 'x'"),
        ("recipe.json", {"seed": 0, "data": [1]}, "its data is"),
        ("run.json", [], "expected a JSON object"),
        ("run.json", {"data": None}, "its data is 'None'"),
        ("result.json", {"seconds": "x"}, "its seconds is 'x'"),
        ("result.json", {"sha256": None}, "was changed after the training wrote it"),
    ],
)
def test_files_of_a_run_that_somebody_edited(tmp_path, file, told, message):
    (tmp_path / "recipe.json").write_text('{"task": "classification", "seed": 0}')
    (tmp_path / file).write_text(json.dumps(told))
    run_folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match=message):
        _ = run_folder.seed, run_folder.facts, run_folder.result


def test_one_damaged_run_does_not_hide_the_others(tmp_path, capsys):
    for name, text in (("a", "{"), ("b", '{"task": "classification", "seed": 0, "data": {"folder": "x"}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(text)
    assert run(["ls", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert "cannot be read" in next(line for line in output if f"{tmp_path / 'a'} " in line)
    assert "started" in next(line for line in output if f"{tmp_path / 'b'} " in line)


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch, capsys):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr("repulsive.lab.runs.listing.describe_recipes", missing)
    assert run(["ls"]) == 2
    assert capsys.readouterr().err == (
        "repulsive: this needs the package numpy; "
        "install it with: python -m pip install -e '.[train]' -c constraints.txt\n"
    )


def test_the_harness_notices(samples, tmp_path):
    """A reader that crashes, hangs, writes where it may not, or leaves half a folder fails."""

    def crash(folder, out):
        raise KeyError("x")

    def scribble(folder, out):
        (folder.parent / "beside.txt").write_text("mine")

    def half(folder, out):
        out.mkdir(exist_ok=True)
        (out / "manifest.json").write_text("{}")
        raise ConfigError("no")

    def forever():
        while True:
            pass

    good = replace(SUBJECTS[0], name="harness", make=write_tsv)
    samples.of(good)
    for number, (read, message) in enumerate(((crash, "KeyError"), (scribble, "beside"), (half, "looks whole"))):
        with pytest.raises(AssertionError, match=message):
            attempt(replace(good, read=read), 1, samples, tmp_path / str(number))
    with pytest.raises(harness.Hangs), harness._limited(0.05):
        threading.Event().wait(60)
    with pytest.raises(harness.Hangs), harness._limited(0.05):
        forever()

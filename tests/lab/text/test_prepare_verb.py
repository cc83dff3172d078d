"""`repulsive prepare`: its output, the default folders, and errors."""

import pytest

from repulsive.cli.app import run
from repulsive.lab.text.prepared import Prepared


@pytest.fixture
def toy(tmp_path):
    contents = {"train": "A b a a b\tno\nx X\tyes\nc\tno\n", "dev": "a d d d d\tyes\nb b\tno\n", "test": "b\tno\n"}
    (tmp_path / "raw").mkdir()
    for part, lines in contents.items():
        (tmp_path / "raw" / f"{part}.tsv").write_text("text\tlabel\n" + lines)
    return tmp_path


def test_the_verb_prints_a_table_and_then_leaves_the_folder_alone(toy, monkeypatch, capsys):
    monkeypatch.setenv("REPULSIVE_DATA", str(toy / "raw"))
    monkeypatch.chdir(toy)
    vectors = toy / "glove.txt"
    vectors.write_text("a 1 2\nb 3 4\n")
    command = ["prepare", "tsv", "--tokenizer", "regex", "--vectors", str(vectors)]
    assert run(command) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.splitlines() == [
        "tsv -> prepared/tsv",
        "                train     dev    test",
        "rows                3       2       1",
        "skipped             0       0       0",
        "cut                 0       0       0",
        "unknown words  12.50%  57.14%   0.00%",
        "class no        66.7%   50.0%  100.0%",
        "class yes       33.3%   50.0%    0.0%",
        "vocabulary of 5, sentences of 200 words at most; vectors for 66.7% of the vocabulary, 62.5% of running words",
    ]
    assert Prepared.load(toy / "prepared" / "tsv").task == "tsv"
    assert run(command) == 0 and "is prepared already" in capsys.readouterr().out
    assert run([*command, "--minimum", "1"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "--force" in output.err
    assert run([*command, "--minimum", "1", "--force"]) == 0


def test_the_default_data_folder_has_the_name_of_the_dataset(toy, monkeypatch, capsys):
    (toy / "raw").rename(toy / "tsv")
    monkeypatch.setenv("REPULSIVE_DATA", str(toy))
    command = ["prepare", "tsv", "--tokenizer", "regex", "--out", str(toy / "out")]
    assert run([*command, "--label", "1", "--text", "0"]) == 0
    assert "class label" in capsys.readouterr().out  # columns by number: the first line is a text as any other
    assert run(["prepare", "reviews", "--train", "9", "--dev", "2", "--test", "2", "--out", str(toy / "made")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["snl"], "did you mean 'snli'?"),
        (["yelp"], "give --data, or set REPULSIVE_DATA"),
        (["reviews", "--aspects", "3", "9"], "from 1 to 6"),
        (["reviews", "--jobs", "0"], "--jobs: 0: expected at least 1"),
        (["reviews", "--also", "more=raw/test"], "dataset 'reviews' has no option '--also'"),
        (["translation", "--also", "raw/test"], "--also: 'raw/test': give NAME=PATH"),
        (["translation", "--also", "more="], "--also: 'more=': give NAME=PATH"),
        (["translation", "--also", "a=raw/dev", "--also", "a=raw/test"], "--also: 'a' is given twice"),
        (["reviews", "--dev", "0.5"], "Invalid value for '--dev'"),
    ],
)
def test_mistakes_at_the_command_line_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("REPULSIVE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run(["prepare", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and message in output.err
    assert list(tmp_path.iterdir()) == []


def test_skipped_lines_are_reported_in_one_line(toy, capsys):
    (toy / "raw" / "dev.tsv").write_text("text\tlabel\na\tno\nbroken\n")
    assert run(["prepare", "tsv", "--tokenizer", "regex", "--data", str(toy / "raw"), "--out", str(toy / "out")]) == 0
    output = capsys.readouterr().err
    assert output.startswith("repulsive: ") and output.count("\n") == 1 and "1 bad line skipped: line 3" in output

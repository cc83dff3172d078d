"""URLs where a path is expected are refused, and nothing is written."""

from pathlib import Path

import pytest

from repulsive.cli.app import run
from repulsive.errors import RunError
from repulsive.lab.engine.runs import RunFolder
from repulsive.safety.local_paths import remote_argument, remote_folder


@pytest.mark.parametrize(
    "words",
    [
        ["train", "reviews/ma", "--out", "s3://bucket/runs"],
        ["train", "reviews/ma", "--out=gs://bucket/runs"],
        ["train", "reviews/ma", "--set", "data.folder=hf://datasets/x"],
        ["sweep", "reviews/spos", "--storage", "sqlite:///sweep.db", "--out", "s3://bucket/sweep"],
        ["reproduce", "table1", "--runs", "abfs://runs"],
        ["evaluate", "s3://bucket/runs/reviews/ma"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_url_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "://" in err and ": expected a local path, got a URL; train to a local folder, then copy" in err
    assert list(tmp_path.iterdir()) == []


def test_passwords_are_hidden(capsys):
    assert run(["train", "reviews/ma", "--out", "sftp://ann:secret@host/runs"]) == 2
    assert "sftp://ann:***@host/runs: expected" in capsys.readouterr().err


def test_the_advice_works(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "ma").mkdir(parents=True)
    (tmp_path / "runs" / "ma" / "result.json").write_text("{}")
    advice = remote_argument(["train", "--out", "memory://bucket/runs"]).partition("then copy it: ")[2]
    eval(advice, {"fsspec": fsspec})
    assert fsspec.filesystem("memory").cat("/bucket/runs/ma/result.json") == b"{}"


def test_a_path_that_was_made_from_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("s3://bucket/run"))
    with pytest.raises(RunError, match="s3:/bucket/run: expected a local path"), folder.locked():
        pytest.fail("locked")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["runs", "/tmp/s3:/x", "C:/runs", "a:b", "", "s3"])
def test_local_paths_are_accepted(path):
    assert remote_folder(Path(path)) is None
    assert remote_argument(["train", "x", "--out", path, "--storage=postgresql://h/db", "--set", "a=b:c/d"]) is None

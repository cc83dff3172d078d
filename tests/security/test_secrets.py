"""Passwords in the URL of a storage appear neither in errors nor in files."""

import sys

import pytest

from repulsive.cli.app import run
from repulsive.errors import ConfigError
from repulsive.lab.engine import sweep
from repulsive.safety.secrets import redact, redact_word
from tests.lab.engine import tiny

SECRET = "hunter2"
URLS = [
    f"mysql://ann:{SECRET}@localhost/db",
    f"postgresql+psycopg2://ann:{SECRET}@host:5432/db",
    f"redis://:{SECRET}@host",
    f"mysql://ann:p@{SECRET}/x:@host/db",
    f"mysql://host/db?user=ann&password={SECRET}",
    f"mysql://host/db?ssl=1;token={SECRET}",
    f"nonsense://ann:{SECRET}@host/db",
]


@pytest.mark.parametrize("url", URLS)
def test_passwords_are_removed(url):
    for text in (redact(url), redact_word(url), redact(f"storage '{url}' cannot be opened, {url}"), redact_word(url)):
        assert SECRET not in text and "***" in text


def test_other_text_is_unchanged():
    for text in ("sqlite:////tmp/a.db", "https://host/a:b", "mail ann@host: 3:4", "a://b", "user:pass@host"):
        assert redact(text) == text == redact_word(text)
    assert redact(URLS[1]) == "postgresql+psycopg2://ann:***@host:5432/db"
    assert SECRET not in redact_word(f"mysql://ann:a b {SECRET}@host/db")


@pytest.mark.parametrize("url", URLS)
def test_errors_of_a_storage_have_no_password(url):
    pytest.importorskip("optuna")
    with pytest.raises(ConfigError) as caught:
        sweep._study("name", url)
    assert SECRET not in str(caught.value) and "cannot be opened" in str(caught.value)


def test_the_command_line_prints_no_password(tmp_path, capsys):
    assert run(["train", f"mysql://ann:{SECRET}@host/db"]) == 2
    printed = capsys.readouterr()
    assert SECRET not in printed.err + printed.out and printed.err.count("\n") == 1


def test_a_run_stores_no_password(tmp_path, monkeypatch):
    data = tiny.make_data(tmp_path / "prepared")
    monkeypatch.setattr(sys, "argv", ["repulsive", "sweep", "x", "--storage", URLS[0], f"--storage={URLS[1]}"])
    folder = tiny.train(data, tmp_path / "run", "training.epochs=1").path
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in texts)
    assert "mysql://ann:***@localhost/db" in (folder / "run.json").read_text()

"""Progress on stderr: a bar at a terminal, plain lines elsewhere."""

import os
import re
import sys

from repulsive.terminal import progress
from tests.terminal.pseudoterminal import run_at_a_terminal

STEPS = """
import warnings
from repulsive.terminal.progress import progress_bar
with progress_bar() as show:
    for step in range(4):
        show("reading", step, 4)
        if step == 1:
            warnings.warn("line 3 is empty")
    show("writing", 1, 0)
"""
TWO_MODELS = """
from repulsive.terminal.progress import progress_bar
with progress_bar() as show:
    for total in (4, 3):
        for step in range(total):
            show("ablating heads", step + 1, total)
"""


def test_lines_with_the_time_left(monkeypatch, capsys):
    class Now:
        seconds = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Now.seconds)
    with progress.progress_bar() as show:
        show("reading", 0, 1000)
        Now.seconds += 9
        show("reading", 90, 1000)
        assert capsys.readouterr().err == ""
        Now.seconds += 1
        show("reading", 100, 1000)
        assert capsys.readouterr().err == "reading: 100 of 1,000, 0:01:30 left\n"  # 100 took 10 s, 900 are to come
        Now.seconds += 10
        show("writing", 5, 0)
        Now.seconds += 10
        show("writing", 6, 0)
        assert capsys.readouterr().err == "writing: 6\n"


def test_without_lines_nothing_is_shown_in_a_file(monkeypatch, capsys):
    seconds = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.progress_bar(lines=False) as show:
        for step in range(4):
            show("reading", step, 4)
    assert capsys.readouterr() == ("", "")


def at_a_terminal(code: str) -> tuple[str, str]:
    return run_at_a_terminal([sys.executable, "-c", code], dict(os.environ), columns=80)


def test_a_bar_at_a_terminal():
    out, text = at_a_terminal(STEPS)
    assert out == ""
    assert re.search(r"reading ━.* \d/4 (\d:\d\d:\d\d|-:--:--)", text)
    assert "repulsive: line 3 is empty" in text and "UserWarning" not in text and "writing" in text


def test_a_stage_that_starts_again_has_its_own_total():
    _, text = at_a_terminal(TWO_MODELS)
    assert re.search(r"ablating heads ━.* \d/4 .*ablating heads ━.* 3/3 ", text, re.S)

"""Tokenising in several processes."""

import subprocess
import sys

import pytest

from repulsive.lab.text import tokenizing


def test_several_processes_give_the_same_words(monkeypatch):
    texts = [f"It isn't {i} words, is it?" * (i % 3 + 1) for i in range(12)]
    alone = tokenizing.tokenize(texts, "regex", lowercase=True, longest=7)
    monkeypatch.setattr(tokenizing, "_FEW", 0)
    monkeypatch.setattr(tokenizing, "_CHUNK", 5)
    calls = []
    together = tokenizing.tokenize(
        texts, "regex", lowercase=True, longest=7, jobs=2, progress=lambda *news: calls.append(news)
    )
    assert together == alone and alone[0][1] == ["it", "is", "n't", "1", "words", ",", "is"] and alone[1][1] == 18
    assert calls == [("words", 5, 12), ("words", 10, 12), ("words", 12, 12)]


@pytest.mark.slow
def test_a_script_without_a_main_guard_gets_a_clear_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from repulsive.lab.text import tokenizing\ntokenizing._FEW = 0\n"
        "tokenizing.tokenize(['a'] * 600, 'regex', jobs=2)\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert result.returncode and "DataError: a worker process ended early" in result.stderr

"""`repulsive demo` in a process of its own: worker processes, output without a terminal, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.lab.engine import tiny

pytestmark = pytest.mark.slow


def start(folder, *words):
    command = [sys.executable, "-m", "repulsive", "demo", "--out", "out", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=tiny.default_signals,
    )


def test_without_a_terminal_it_prints_lines_and_ends_with_the_result(tmp_path):
    out, err = (process := start(tmp_path, "--steps", "4", "--seeds", "2", "--seed", "7", "--jobs", "2")).communicate()
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out and len(re.findall(r"^ \d of 6  seed [78]  ", out, re.M)) == 6
    lines = out.splitlines()
    row = next(line for line in lines if line.startswith("held-out loss"))
    plain = re.search(r"plain +([\d.]+)", row)[1]
    change = re.search(r"repelled +[\d.]+  (\S+ \[\S+, \S+\])", lines[lines.index(row) + 1])[1]
    assert f"Loss {change}: " in lines[-1]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8").replace("−", "-")
    assert change in page and f"<td>{plain}</td>" in page


def test_json_alone_is_printed_to_stdout(tmp_path):
    out, _ = (process := start(tmp_path, "--steps", "2", "--seeds", "2", "--json")).communicate()
    assert process.returncode == 0
    document = json.loads(out)
    assert set(document) == {"seeds", "measures", "sentence", "shown_seed"}
    assert document == json.loads((tmp_path / "out" / "summary.json").read_text())


def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    losses = []
    for jobs in (1, 3):
        folder = tmp_path / str(jobs)
        folder.mkdir()
        out, _ = start(folder, "--steps", "3", "--seeds", "1", "--jobs", str(jobs)).communicate()
        losses.append(sorted(re.findall(r"(\w+) +held-out loss ([\d.]+)", out)))
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def test_ctrl_c_ends_with_one_line_and_the_same_command_resumes(tmp_path):
    words = ("--steps", "40", "--seeds", "1", "--jobs", "1")
    process = start(tmp_path, *words)
    first = tmp_path / "out" / "runs" / "plain" / "seed-0" / "result.json"
    deadline = time.monotonic() + tiny.PATIENCE
    while not first.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=tiny.PATIENCE)
    assert process.returncode == 130
    # One run has ended; on a busy machine a second one, too.
    assert re.fullmatch(r"repulsive: stopped with [12] of 3 runs left; run the same command to resume\n", err)
    stamp = first.stat().st_mtime_ns
    out, _ = (again := start(tmp_path, *words)).communicate()
    assert again.returncode == 0 and first.stat().st_mtime_ns == stamp and "page: out/report.html" in out

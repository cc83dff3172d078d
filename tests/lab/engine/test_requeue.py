"""SIGUSR1 saves the training and requeues the SLURM job, with a fake `scontrol` on PATH."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repulsive.cli.app import run
from repulsive.errors import ConfigError
from repulsive.lab.engine.requeue import job_id, requeueing
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stop_signals import Stopped
from repulsive.lab.engine.workers import STOPPED, WorkerPool
from tests.lab.engine import tiny
from tests.lab.engine.jobs import sleep
from tests.test_readme import ROOT, blocks

LONG = ("training.epochs=2000", "training.log_every=2", "training.save_seconds=100000")


def add_scontrol(folder: Path, code: int = 0) -> Path:
    """Write a fake `scontrol` that logs its arguments, and SIGTERM as SLURM would send it to the requeued job."""
    folder.mkdir(exist_ok=True)
    script = folder / "scontrol"
    log = folder / "calls.txt"
    failure = "echo no such job >&2\n" if code else ""
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\nkill -TERM $PPID\n{failure}exit {code}\n')
    script.chmod(0o755)
    return log


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Pretend that this is SLURM job 123; return the log of the fake `scontrol`."""
    log = add_scontrol(tmp_path / "bin")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("PATH", f"{log.parent}{os.pathsep}{os.environ['PATH']}")
    return log


def stop(number=signal.SIGUSR1, wanted=True):
    """Stop a training by a signal; return the message."""
    with pytest.raises(Stopped) as caught, requeueing(wanted):
        raise Stopped("stopped at step 8", number)
    assert caught.value.number == number
    return str(caught.value)


def test_sigusr1_requeues_the_job(job):
    assert stop() == "stopped at step 8; requeued job 123"
    assert job.read_text() == "requeue 123\n"


def test_a_task_of_an_array_is_requeued_alone(job, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "120")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert stop() == "stopped at step 8; requeued job 120_3"
    assert job_id({"SLURM_JOB_ID": "7"}) == "7" and job_id({}) is None


@pytest.mark.parametrize(
    ("number", "wanted", "rank"),
    [
        (signal.SIGTERM, True, "0"),
        (signal.SIGINT, True, "0"),
        (signal.SIGUSR1, False, "0"),
        (signal.SIGUSR1, True, "1"),
    ],
    ids=["SIGTERM", "Ctrl-C", "not wanted", "second rank"],
)
def test_other_stops_do_not_requeue(number, wanted, rank, job, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    assert stop(number, wanted) == "stopped at step 8"
    assert not job.exists()


def test_outside_of_slurm_the_message_says_why(job, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    assert stop() == "stopped at step 8; not requeued, because SLURM_JOB_ID is not set"
    assert not job.exists()


def test_a_missing_scontrol_is_an_error_before_training(job, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="--requeue: scontrol is not on PATH"), requeueing(True):
        pytest.fail("training started")


def test_a_failing_scontrol_is_reported(job):
    add_scontrol(job.parent, code=1)
    assert stop() == "stopped at step 8; job 123 was not requeued (scontrol: no such job)"


def test_sigusr1_while_data_are_loaded(job):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Stopped, match="stopped outside of the training loop; requeued job 123"), requeueing(True):
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_command_line_saves_requeues_and_resumes(job, data, tmp_path, monkeypatch, capsys):
    more = ("training.log_every=4",)
    words, folder = tiny.words(data, tmp_path / "out", *more), tiny.folder_of(data, tmp_path / "out", *more)
    log = RunFolder.log

    def interrupted(self, kind, step, values):
        log(self, kind, step, values)
        if kind == "train" and step == 8:
            os.kill(os.getpid(), signal.SIGUSR1)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "log", interrupted)
        code = run([*words, "--quiet", "--requeue"])
    assert (code, job.read_text()) == (138, "requeue 123\n")
    message = "repulsive: stopped at step 8 of 20; rerun the same command to resume; requeued job 123\n"
    assert capsys.readouterr().err == message
    assert run([*words, "--quiet", "--requeue"]) == 0
    tiny.train(data, tmp_path / "whole", *more)
    tiny.assert_same(folder, tmp_path / "whole")


def wait_for_steps(folder, count, process):
    until = time.monotonic() + tiny.PATIENCE
    while len(tiny.steps(folder)) < count and time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
    assert len(tiny.steps(folder)) >= count, process.communicate()[1]


def sbatch_file(index: int) -> str:
    """Return one of the sbatch files in the documentation."""
    found = [b.text for b in blocks((ROOT / "docs" / "training.md").read_text(), "bash") if "#SBATCH" in b.text]
    return found[index]


@pytest.mark.slow
@pytest.mark.parametrize(("index", "expected"), [(0, 138), (1, 1)], ids=["one process", "torchrun"])
def test_the_sbatch_files_of_the_documentation(index, expected, job, data, tmp_path):
    """SLURM starts the file with bash and signals that process; the requeued job runs the same file."""
    out = tmp_path / "out"
    folder = tiny.folder_of(data, out, *LONG)
    train = " ".join(tiny.words(data, out, *LONG)[1:])
    text = sbatch_file(index).replace("train yelp/svgd", f"train {train}")
    script = tmp_path / "job.sbatch"
    script.write_text(text.replace("repulsive train", f"{sys.executable} -m repulsive train") if not index else text)
    environment = tiny.environment()
    environment["PATH"] = f"{job.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    saved = 0
    for start in (1, 2):
        process = subprocess.Popen(
            ["bash", str(script)],
            env=environment,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            wait_for_steps(folder, saved // 2 + 3, process)
            process.send_signal(signal.SIGUSR1)
            _, errors = process.communicate(timeout=tiny.PATIENCE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == expected, errors
        assert "rerun the same command to resume; requeued job 123" in errors
        assert job.read_text() == "requeue 123\n" * start
        step, _ = RunFolder(folder).checkpoints.latest()
        assert step > saved  # the second start resumed
        saved = step
    assert f"resuming from step {saved}" not in errors and "resuming from step" in errors


@pytest.mark.slow
def test_a_worker_that_sigusr1_ends_before_it_trains_is_stopped(tmp_path):
    with WorkerPool(sleep) as pool:
        pool.start(tiny.Spec(None, tmp_path / "run"))
        os.kill(pool._workers[0].process.pid, signal.SIGUSR1)
        ((_, outcome),) = pool.ended(60)
    assert outcome == STOPPED

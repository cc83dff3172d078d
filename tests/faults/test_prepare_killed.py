"""`prepare`, killed or started twice: no worker process is left, and no prepared folder is lost."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repulsive.errors import DataError
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.text.claims import claimed
from repulsive.lab.text.folders import MANIFEST, read_folder, write_folder
from tests.lab.engine import tiny

# Holds the claim on a folder until it is killed.
HOLDING = """
import sys, time
from pathlib import Path
from repulsive.lab.text.claims import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
# Starts workers that tokenise, and prints their process ids.
WORKING = """
import sys, time
from repulsive.lab.text import tokenizing
def main():
    tokenizing._FEW = 0
    def tell(*_):
        import multiprocessing
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        time.sleep(60)
    tokenizing.tokenize(["some words"] * 2000, "regex", jobs=2, progress=tell)
if __name__ == "__main__":
    main()
"""


def start(script, *words):
    command = [sys.executable, str(script), *map(str, words)]
    return subprocess.Popen(command, env=tiny.environment(), stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, number):
    script = tmp_path / "working.py"
    script.write_text(WORKING)
    process = start(script)
    try:
        workers = [int(word) for word in process.stdout.readline().split()]
        assert workers and all(map(tiny.alive, workers))
        process.send_signal(number)
        process.wait()
        until = time.monotonic() + tiny.PATIENCE
        while any(map(tiny.alive, workers)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(tiny.alive, workers))
    finally:
        process.kill()
        process.stdout.close()


def test_two_processes_do_not_prepare_one_folder(tmp_path):
    script, folder = tmp_path / "holding.py", tmp_path / "in" / "toy"
    script.write_text(HOLDING)
    process = start(script, folder)
    try:
        assert process.stdout.readline() == "held\n"
        (tmp_path / "in" / f".toy.{process.pid}.new").mkdir()  # its unfinished folder
        with pytest.raises(DataError, match="another process is preparing it"):
            prepare("reviews", None, folder, train=30, dev=10, test=10, jobs=1)
        with pytest.raises(DataError, match="another process is preparing it"):
            write_folder(folder, {"a": b"1"}, {})
        assert (tmp_path / "in" / f".toy.{process.pid}.new").is_dir()
        write_folder(folder.with_name("other"), {"a": b"1"}, {})  # other folders are not locked
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    write_folder(folder, {"a": b"1"}, {})  # the lock ended with the process
    assert sorted(path.name for path in folder.parent.iterdir()) == ["other", "toy"]


def test_a_process_may_claim_its_folder_again(tmp_path):
    with claimed(tmp_path / "toy"), claimed(tmp_path / "toy"):
        write_folder(tmp_path / "toy", {"a": b"1"}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_disk_without_locks_gives_a_warning(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"):
        write_folder(tmp_path / "toy", {"a": b"1"}, {})
    assert read_folder(tmp_path / "toy")[0] == {"a": b"1"}


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("reader", ["load", "write"])
def test_killed_between_two_renames(tmp_path, monkeypatch, reader):
    """The old folder is moved away and the new one is not in place yet: the next process restores the old one."""
    folder = tmp_path / "toy"
    write_folder(folder, {"a": b"old"}, {})
    os.rename(folder, tmp_path / ".toy.123.old")
    (tmp_path / ".toy.123.new").mkdir()
    if reader == "load":
        assert read_folder(folder)[0] == {"a": b"old"}
    else:
        monkeypatch.setattr("shutil.rmtree", lambda *given, **named: None)

        def rename(source, target):
            raise Killed

        with claimed(folder):
            assert read_folder(folder)[0] == {"a": b"old"}
            monkeypatch.setattr(os, "rename", rename)
            with pytest.raises(Killed):
                write_folder(folder, {"a": b"new"}, {})
        monkeypatch.undo()
        assert read_folder(folder)[0] == {"a": b"old"}
    write_folder(folder, {"a": b"new"}, {})
    assert read_folder(folder)[0] == {"a": b"new"} and [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_everything_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename

    def note(handle):
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", lambda *words: (events.append("rename"), rename(*words)))
    write_folder(tmp_path / "toy", {"a": b"1", "b": b"2"}, {})
    before, after = events[: events.index("rename")], events[events.index("rename") :]
    assert {"a", "b", MANIFEST, f".toy.{os.getpid()}.new"} <= set(before) and tmp_path.name in after

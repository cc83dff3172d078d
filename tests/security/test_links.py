"""Symbolic links in untrusted folders: nothing that a run writes changes the target of a link."""

import os
import stat

import pytest

from repulsive.cli.app import run
from repulsive.errors import CheckpointError, RunError
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.sweep import storage_in
from repulsive.lab.engine.workers import LOG, _work
from repulsive.safety.files import locked, open_append, open_new, write_whole
from tests.lab.engine import tiny

CONTENT = b"the only copy\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.make_data(tmp_path_factory.mktemp("tiny") / "prepared")


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


class Printing:
    """A job whose output goes to the log in its folder."""

    def __init__(self, folder):
        self.folder = folder


def test_a_lock_that_is_a_link_is_refused(folder, victim):
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(RunError, match=r"symbolic link, which is not followed"), RunFolder(folder).locked():
        pytest.fail("the lock was taken")
    assert victim.read_bytes() == CONTENT


def test_a_lock_truncates_nothing(folder):
    (folder / ".lock").write_bytes(CONTENT)
    with RunFolder(folder).locked(), pytest.raises(RunError, match="another process is training here"):
        RunFolder(folder).locked().__enter__()
    assert (folder / ".lock").read_bytes() == CONTENT


def test_a_log_that_is_a_link_is_refused(folder, victim):
    (folder / LOG).symlink_to(victim)
    assert "symbolic link" in _work(Printing(folder), lambda job, file: print("more", file=file))
    assert victim.read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "run.json", "recipe.json", "diverged.txt"])
@pytest.mark.parametrize("dangling", [False, True])
def test_no_file_of_a_run_is_written_through_a_link(folder, victim, name, dangling):
    if dangling:
        victim.unlink()
    (folder / name).symlink_to(victim)
    made = RunFolder(folder)
    if name == "metrics.jsonl":
        for write in (lambda: made.log("train", 1, {"loss": 1.0}), made.sync):
            with pytest.raises(RunError, match="symbolic link"):
                write()
    else:
        write_whole(folder / name, b"new")  # as all other files are written
        assert (folder / name).read_bytes() == b"new" and not (folder / name).is_symlink()
    assert (victim.read_bytes() == CONTENT) if not dangling else not victim.exists()


@pytest.mark.parametrize("name", ["checkpoints", "best", "tensorboard"])
def test_no_folder_of_a_run_is_a_link(data, tmp_path, name):
    folder = tiny.folder_of(data, tmp_path / "out")
    outside = tmp_path / "outside"
    (outside / "step-000000001").mkdir(parents=True)
    (outside / ".step-000000001-1").mkdir()
    folder.mkdir(parents=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(RunError, match="symbolic link"):
        tiny.train(data, folder)
    assert sorted(path.name for path in outside.iterdir()) == [".step-000000001-1", "step-000000001"]
    with pytest.raises(CheckpointError, match="symbolic link"):
        Checkpoints(folder / name).save(2, {"x": 1})


def test_a_database_that_is_a_link_is_refused(folder, victim):
    (folder / "optuna.db").symlink_to(victim)
    with pytest.raises(RunError, match="symbolic link"):
        storage_in(folder)


def test_training_in_an_untrusted_folder_ends_in_one_line(data, tmp_path, victim, capsys):
    folder = tiny.folder_of(data, tmp_path / "out")
    folder.mkdir(parents=True)
    (folder / ".lock").symlink_to(victim)
    assert run(tiny.words(data, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "symbolic link" in error and error.count("\n") == 1
    assert victim.read_bytes() == CONTENT


def test_a_temporary_file_that_is_a_link_is_replaced(folder, victim):
    temporary = folder / f".result.json.aside-{os.getpid()}"
    temporary.symlink_to(victim)
    write_whole(folder / "result.json", b"{}")
    assert victim.read_bytes() == CONTENT and [path.name for path in folder.iterdir()] == ["result.json"]


def test_pipes_and_folders_are_refused(folder):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    for name in ("pipe", "sub"):
        with pytest.raises(OSError):  # noqa: PT011  several kinds
            open_append(folder / name)


def test_new_files_follow_the_umask(folder):
    before = os.umask(0o022)
    try:
        open_new(folder / "a").close()
        open_append(folder / "b").close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in "ab"] == [0o644, 0o644]


def test_a_lock_file_that_is_removed_afterwards_still_locks(folder):
    with locked(folder / "lock", remove=True):
        with pytest.raises(BlockingIOError), locked(folder / "lock", remove=True):
            pytest.fail("the lock was taken twice")
        assert (folder / "lock").exists()
    assert not (folder / "lock").exists()

"""`repulsive train`: output, user errors, signals, a full disk, and resuming."""

import json
import os
import re
import resource
import signal
import subprocess

import pytest

from repulsive.cli.app import run
from repulsive.lab.engine.runs import RunFolder
from tests.lab.engine import tiny
from tests.terminal.pseudoterminal import run_at_a_terminal


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.make_data(tmp_path_factory.mktemp("tiny") / "prepared")


@pytest.fixture
def repulsive(monkeypatch, tmp_path, capsys):
    """Run the command in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = run([str(word) for word in words])
        return (code, *capsys.readouterr())

    return call


def one_line(code, out, err):
    assert (code, out) == (2, "")
    assert re.fullmatch(r"repulsive: [^\n]+\n", err)
    return err


def test_training_prints_progress_and_a_second_call_prints_the_result_again(repulsive, data, tmp_path):
    words = tiny.words(data, tmp_path / "out")
    code, out, err = repulsive(*words)
    assert code == 0
    assert err.startswith("starting: 20 steps, 10 per epoch\nstep 10  loss 1.")
    assert re.search(r"^step 20  loss [\d.]+  dev accuracy [\d.]+ .* 0:00:00 left$", err, re.M)
    head, row = out.splitlines()[:2]
    assert (
        head.split() == ["method", "seeds", "accuracy", "nll"] and row.split()[:2] == ["tiny", "1"] and "|" not in out
    )
    assert err.splitlines()[-1] == f"{tiny.folder_of(data, tmp_path / 'out')}: done"
    assert repulsive(*words) == (0, out, "".join(err.splitlines(True)[-2:]))  # it is already trained
    code, out, err = repulsive(*words, "--quiet", "--seed", "1")
    assert (code, err) == (0, "") and out.splitlines()[1].split()[:2] == ["tiny", "1"]
    code, out, err = repulsive(*words, "--quiet", "--markdown")
    assert (code, err) == (0, "") and out.startswith("| method | seeds | accuracy | nll |") and "| tiny | 1 |" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere.toml"], "nowhere.toml: cannot be read (No such file"),
        (["reviews/svdg"], "did you mean 'reviews/svgd'?"),
        (["reviews/svgd", "--logger", "wandd"], "unknown logger 'wandd'; did you mean 'wandb'? choose from"),
        (["yelp/ma", "--set", "data.folder=there"], "there: nothing prepared here; run: repulsive prepare"),
        (["TINY", "--set", "trainig.epochs=2"], "unknown key 'trainig'; did you mean 'training'?"),
        (["TINY", "--set", "training.epoch=2"], "training: unknown key 'epoch'; did you mean 'epochs'?"),
        (["TINY", "--set", "lr=0.1"], "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        (["TINY", "--set", "schedule=linear"], "did you mean 'optimizer.schedule' or 'method.schedule'?"),
        (["TINY", "--set", "training.epochs=two"], "training: epochs: must be int, not 'two'"),
        (["TINY", "--set", "training.epochs"], "write it as key=value"),
        (["TINY", "training.epochs=2"], "to change a setting, write --set training.epochs=2"),
        (["runs/yelp/ma+heads=8"], "neither a file nor a built-in recipe; `repulsive ls` lists the built-in recipes"),
        (["TINY", "--set", "optimizer.lr=nan"], "optimizer: lr: must be a number"),
        (["TINY", "--set", "optimizer.betas=[0.9, 1.0]"], "betas=[0.9, 1.0] must be at least 0 and below 1"),
        (["TINY", "--set", "method.stepsize=-1"], "tiny.toml: method: SPOS(stepsize=-1.0): must be a number > 0"),
        (["TINY", "yelp/ma", "--set", "method.alpha=-1"], "tiny.toml: method: SPOS(alpha=-1.0)"),
        (["TINY", "--set", "optimizer.momentum=-1"], "momentum=-1.0 must not be negative"),
        (["TINY", "--set", "training.evaluate_every=-5"], "evaluate_every=-5 must not be negative"),
        (["TINY", "--set", "method.penalty=-0.1"], "penalty=-0.1 must not be negative"),
        (["TINY", "--set", "method.rule=svdg"], "did you mean 'svgd'?"),
        (["TINY", "--set", "model.units=0"], "model: units=0 must be at least 1"),
        (["TINY", "--set", "model.dropout=2"], "dropout=2.0 must be"),
        (["TINY", "--set", "task=[1]"], "task must be one of classification, translation, "),
        (["TINY", "--set", "data.folder=elsewhere"], "elsewhere: nothing prepared here"),
        (["TINY", "--set", "training.epochs=3", "--out", "FILE"], "cannot be written (Not a directory)"),
        (["EMPTY"], "task is missing; write extends = RECIPE, or task = one of classification, "),
        (["TINY", "--seed", "-1"], "seed=-1 must lie between 0 and"),
        (["TINY", "--seed", "1", "--seeds", "2"], "--seed or --seeds, not both"),
        (["TINY", "--seeds", "many"], "Invalid value for '--seeds'"),
        (["TINY", "TINY"], "two runs would share the folder"),
        (["TINY", "--device", "tpu"], "choose cpu or cuda"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_user_errors_print_one_line(words, expected, repulsive, data, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.toml").write_text("")
    names = {"TINY": tiny.toml(data), "FILE": tmp_path / "file", "EMPTY": tmp_path / "empty.toml"}
    assert expected in one_line(*repulsive("train", *(names.get(word, word) for word in words)))


@pytest.fixture(autouse=True)
def handle_interrupts():
    """Restore the default handler of Ctrl-C: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_a_checkpoint_and_the_same_command_resumes(
    number, expected, repulsive, data, tmp_path, monkeypatch
):
    more = ("training.log_every=4",)
    words, folder = tiny.words(data, tmp_path / "out", *more), tiny.folder_of(data, tmp_path / "out", *more)
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "log", interrupted(RunFolder.log, 8, number))
        code, out, err = repulsive(*words, "--quiet")
    assert (code, out) == (expected, "")
    assert err == "repulsive: stopped at step 8 of 20; rerun the same command to resume\n"
    assert RunFolder(folder).checkpoints.latest()[0] == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as it was
    code, _, err = repulsive(*words)
    assert code == 0 and err.startswith("resuming from step 8: 20 steps")
    tiny.train(data, tmp_path / "whole", *more)
    tiny.assert_same(folder, tmp_path / "whole")


def interrupted(log, at, *numbers):
    """Wrap `RunFolder.log` to send signals to this process after the training loss of a step is logged."""

    def logged(self, kind, step, values):
        log(self, kind, step, values)
        if kind == "train" and step == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    return logged


def test_two_interrupts_stop_immediately(repulsive, data, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "log", interrupted(RunFolder.log, 8, signal.SIGINT, signal.SIGINT))
    words = tiny.words(data, tmp_path / "out", "training.log_every=4")
    code, out, err = repulsive(*words, "--quiet")
    assert (code, out, err.strip()) == (130, "", "repulsive: stopped")
    assert not RunFolder(tiny.folder_of(data, tmp_path / "out", "training.log_every=4")).checkpoints.paths()


def test_an_ignored_ctrl_c_stays_ignored(repulsive, data, tmp_path, monkeypatch):
    """Background jobs of a shell ignore Ctrl-C."""
    monkeypatch.setattr(RunFolder, "log", interrupted(RunFolder.log, 8, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, _, _ = repulsive(*tiny.words(data, tmp_path / "out", "training.log_every=4"), "--quiet")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0


@pytest.mark.parametrize("size", [600, 5_000])
def test_a_full_disk_is_an_error(size, repulsive, data, tmp_path):
    """With the small size run.json does not fit, with the larger one a checkpoint."""
    words = [*tiny.words(data, tmp_path / "out", "training.save_every=1", "training.log_every=3"), "--quiet"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        err = one_line(*repulsive(*words))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"cannot be written \(File too large\); .*run the same command again", err)
    assert repulsive(*words)[0] == 0


def test_a_damaged_checkpoint_is_reported_and_skipped(repulsive, data, tmp_path, monkeypatch):
    more = ("training.save_every=2", "training.log_every=4")
    words, folder = tiny.words(data, tmp_path / "out", *more), tiny.folder_of(data, tmp_path / "out", *more)
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "log", interrupted(RunFolder.log, 8, signal.SIGTERM))
        repulsive(*words)
    (folder / "checkpoints" / "step-000000008" / "state.json").write_text("{")
    code, _, err = repulsive(*words)
    lines = err.splitlines()
    assert code == 0
    assert re.fullmatch(
        r"repulsive: \S+step-000000008: state.json is damaged .*; trying the checkpoint before it", lines[0]
    )
    assert lines[1].startswith("resuming from step 6: ")


def test_a_diverging_run_is_an_error(repulsive, data, tmp_path):
    err = one_line(*repulsive(*tiny.words(data, tmp_path / "out", "optimizer.lr=1e30"), "--quiet"))
    assert re.search(r"step \d+: .* not .*finite.*items \d+, .* and 24 more.*Lower optimizer\.lr", err)


def test_a_terminal_shows_a_progress_bar_and_a_table(data, tmp_path):
    """A real terminal of 100 columns: progress bar, time left, a row per evaluation, and the result on stdout."""
    out, text = run_at_a_terminal(tiny.command(*tiny.words(data, tmp_path / "out")), tiny.environment(), columns=100)
    assert "dev accuracy" in text and "repulsion / drive" in text
    assert re.search(r"^\s*2\.00\s+1\.\d{4}\s+0\.\d{4}\s", text, re.M)  # row of the second epoch
    assert re.search(r"loss 1\.\d{4} ━+ +20/20 0:00:00", text)
    assert out.split()[:4] == ["method", "seeds", "accuracy", "nll"]


@pytest.mark.slow
def test_parallel_seeds_with_a_table(data, tmp_path):
    """Three recipes with two seeds, one of which diverges: the others finish and are in the table; exit code 2."""
    wild = tmp_path / "wild.toml"
    wild.write_text(f'extends = "{tiny.toml(data)}"\nlabel = "wild"\noptimizer.lr = 1e30\n')
    plain = tmp_path / "plain.toml"
    plain.write_text(f'extends = "{tiny.toml(data)}"\nlabel = "plain"\nmethod.rule = "none"\n')
    words = ["train", str(tiny.toml(data)), str(plain), str(wild), "--seeds", "2", "--jobs", "2", "--device", "cpu"]
    command = tiny.command(*words, "--out", str(tmp_path))
    finished = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    lines = finished.stderr.splitlines()
    assert sorted(line for line in lines if line.endswith(": done")) == sorted(
        f"{tmp_path / name / f'seed-{seed}'}: done" for name in ("tiny", "plain") for seed in (0, 1)
    )
    assert len(lines) == 7 and "Traceback" not in finished.stderr
    assert re.match(r"repulsive: 2 of 6 runs failed; the first: .*wild/seed-\d: step \d+: ", lines[-1])
    table = finished.stdout.splitlines()
    assert re.match(r"tiny +2 +0\.\d{3} ± 0\.\d{3} ", table[1]) and re.match(r"plain +2 ", table[2])
    assert "wild" not in finished.stdout
    assert table[0].endswith("accuracy - tiny") and re.search(r"[+-]0\.\d{3} \(p [\d.]+\)$", table[2])
    single = tmp_path / "single"
    tiny.train(data, single, "seed=1")
    tiny.assert_same(single, tmp_path / "tiny" / "seed-1")
    log = (tmp_path / "wild" / "seed-0" / "log.txt").read_text()
    assert "Lower optimizer.lr" in log
    assert json.loads((tmp_path / "plain" / "seed-1" / "run.json").read_text())["seed"] == 1

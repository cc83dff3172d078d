"""User mistakes, missing memory and Ctrl-C end in one line and the right exit code, without a traceback."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from repulsive.cli.app import run
from repulsive.diagnostics.hooks.calling import call, items_in, real_queries
from repulsive.errors import DataError
from repulsive.lab.engine import launch
from repulsive.lab.systems.classification.task import ClassificationTask
from repulsive.lab.systems.datasets import prepare
from tests.lab.engine import tiny


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("repulsive: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


@pytest.mark.parametrize("words", [["ls", "--out"], ["prepare", "reviews", "--out"], ["inspect", "x", "--out"]])
def test_a_folder_that_is_not_utf_8(words, tmp_path, capsys):
    name = os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")
    assert run([*words, name]) == 2
    assert "is not UTF-8" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory")]
)
def test_out_of_memory(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr("repulsive.lab.runs.listing.describe_recipes", fail)
    assert run(["ls"]) == 2
    assert "out of memory" in one_line(capsys)


def test_out_of_memory_in_training(tmp_path, monkeypatch, capsys):
    data = tiny.make_data(tmp_path / "prepared")

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(launch.Loop, "run", fail)
    assert run([*tiny.words(data, tmp_path / "out"), "--quiet"]) == 2
    assert "out of memory; lower --jobs or training.batch" in one_line(capsys)


class OneDict(nn.Module):
    """Takes its batch as one dictionary."""

    def forward(self, batch):
        return batch["x"] + 1


class Named(nn.Module):
    def forward(self, x, scale=1.0):
        return x * scale


def test_a_forward_that_takes_one_dict():
    batch = {"x": torch.zeros(5, 3), "attention_mask": torch.ones(5, 3)}
    assert torch.equal(call(OneDict(), batch), torch.ones(5, 3))
    assert torch.equal(call(OneDict(), (batch,)), torch.ones(5, 3))
    assert torch.equal(call(Named(), {"x": torch.ones(2), "scale": 3.0}), 3 * torch.ones(2))
    with pytest.raises(TypeError):
        call(nn.Bilinear(2, 2, 2), {"x": torch.ones(2)})
    assert items_in((batch,)) == items_in(batch) == items_in([{"deep": (torch.zeros(5),)}]) == 5
    assert items_in("nothing") == 1
    for given in (batch, (batch,)):
        assert real_queries(given, "encoder").shape == (5, 3)


def test_one_class_is_an_error(tmp_path, capsys):
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.tsv").write_text("label\ttext\n" + "good\tsome words of a text\n" * 30)
    words = ["prepare", "tsv", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--tokenizer", "regex"]
    assert run(words) == 2
    assert "class" in one_line(capsys)


def test_one_class_is_an_error_when_it_was_prepared_before(tmp_path):
    data = tiny.make_data(tmp_path / "prepared")
    recipe = tiny.recipe(data)
    made = prepare("reviews", None, data, train=300, dev=60, test=60, jobs=1)
    made.parts["train"].labels[:] = 1
    made.save()
    with pytest.raises(DataError, match="all training texts are of one class"):
        ClassificationTask(recipe)


def test_data_without_classes_are_named(tmp_path):
    recipe = tiny.recipe(tiny.make_data(tmp_path / "prepared"))
    words = {"de": "ein Hund\n" * 9, "en": "a dog\n" * 9}
    for part in ("train", "dev", "test"):
        for language, text in words.items():
            (tmp_path / f"{part}.{language}").write_text(text)
    prepare("translation", tmp_path, tmp_path / "pairs", tokenizer="none", most=20, jobs=1)
    recipe = replace(recipe, data=replace(recipe.data, folder=tmp_path / "pairs"))
    with pytest.raises(DataError, match="pairs: is dataset 'translation', which has no classes"):
        ClassificationTask(recipe)


# Sends Ctrl-C when the import of torch begins.
INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("words", [["-m", "repulsive", "ls"], [str(Path(sys.executable).with_name("repulsive")), "ls"]])
def test_ctrl_c_while_torch_is_imported(tmp_path, words):
    if not words[0].startswith("-") and not os.path.exists(words[0]):
        pytest.skip("the command is not installed")
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    env = tiny.environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    ended = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False, preexec_fn=tiny.default_signals
    )
    assert ended.stderr == "repulsive: stopped\n"
    assert ended.returncode in (130, -signal.SIGINT)


def test_other_programs_keep_their_excepthook():
    code = "import sys; before = sys.excepthook; import repulsive; assert sys.excepthook is before"
    subprocess.run([sys.executable, "-c", code], env=tiny.environment(), check=True)


def test_ctrl_c_during_an_import_does_not_show_the_errors_of_extension_modules(tmp_path):
    """Modules such as NumPy's turn a KeyboardInterrupt into an ImportError, and pybind11 aborts the process."""
    (tmp_path / "extension.py").write_text(
        "import time\nprint('loading', flush=True)\ntry:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise ImportError('cannot load module more than once per process')\n"
    )
    code = "import sys; sys.argv[0] = 'repulsive'; import repulsive.safety; import extension"
    env = tiny.environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    words = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=env, text=True, preexec_fn=tiny.default_signals, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "repulsive: stopped\n")

"""The example scripts of the integrations run and print the expected results."""

import re

import pytest

from tests.scripts import run_example


@pytest.mark.slow
def test_trainer_llama(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run_example("trainer_llama.py", tmp_path, "--steps", "60")
    lines = re.findall(r"^(\w+): loss [\d.]+, mean cosine between heads (\S+) -> (\S+)$", printed, re.M)
    after = {name: float(end) for name, _, end in lines}
    assert lines[0][1] == lines[1][1]  # same initial weights
    assert after["repulsive"] < after["plain"] - 0.1


@pytest.mark.slow
def test_lightning_classifier(tmp_path):
    pytest.importorskip("lightning")
    printed = run_example("lightning_classifier.py", tmp_path, "--epochs", "2")
    assert re.findall(r"(\d+) steps with repulsion", printed) == ["16", "32"]


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_accelerate_encoder(processes, tmp_path):
    """With two processes only the first prints."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    printed = run_example("accelerate_encoder.py", tmp_path, "--epochs", "4", processes=processes)
    (steps,) = set(re.findall(r"(\d+) steps", printed.partition("end")[2]))
    assert int(steps) * processes == 32
    ends = re.findall(r"^end.*(loss.*)$", printed, re.M)
    assert len(ends) == 2
    assert ends[0] == ends[1]

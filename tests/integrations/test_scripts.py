"""The example scripts of the integrations run to their end, and print what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, tmp_path: Path, *options: str) -> str:
    finished = subprocess.run(
        [sys.executable, EXAMPLES / script, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert list(tmp_path.iterdir()) == []  # an example leaves nothing behind
    return finished.stdout


def test_trainer_llama(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run("trainer_llama.py", tmp_path, "--steps", "60")
    found = re.findall(r"^(\w+): loss [\d.]+, mean cosine between heads (\S+) -> (\S+)$", printed, re.M)
    after = {name: float(end) for name, _, end in found}
    assert found[0][1] == found[1][1]  # both begin alike
    assert after["repulsive"] < after["plain"] - 0.1


def test_lightning_classifier(tmp_path):
    pytest.importorskip("lightning")
    printed = run("lightning_classifier.py", tmp_path, "--epochs", "2")
    assert re.findall(r"(\d+) steps with repulsion", printed) == ["16", "32"]


def test_accelerate_encoder(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    printed = run("accelerate_encoder.py", tmp_path, "--epochs", "4")
    ends = re.findall(r"^end.*(loss.*)$", printed, re.M)
    assert len(ends) == 2
    assert ends[0] == ends[1]

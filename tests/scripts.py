"""Running an example as a user would."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(script: str, folder: Path, *options: str) -> str:
    """What an example prints; it has to end well and to leave nothing behind in the empty `folder` it runs in."""
    finished = subprocess.run(
        [sys.executable, EXAMPLES / script, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert list(folder.iterdir()) == []
    return finished.stdout

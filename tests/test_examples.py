"""Examples run."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_quickstart(tmp_path):
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py", "--steps", "150"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    rows = [line.split() for line in finished.stdout.splitlines()]
    cosine = {row[0]: float(row[-2]) for row in rows if row and row[0] in ("plain", "published:", "sphere,")}
    assert cosine["sphere,"] < cosine["plain"]
    assert cosine["published:"] < cosine["plain"]

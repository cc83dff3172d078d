"""Examples run."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = ("plain", "control:", "published:", "sphere,")  # how the rows of the quickstart's table begin


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
    columns = {row[0]: [float(word) for word in row[-4:]] for row in rows if row and row[0] in NAMES}
    assert set(columns) == set(NAMES)
    cosine, norm = ({name: column[i] for name, column in columns.items()} for i in (2, 3))
    assert cosine["sphere,"] < cosine["plain"] < cosine["control:"]
    # After so few steps the published rule's heads are still more alike than plain ones: smoothing acts first.
    assert cosine["published:"] < cosine["control:"]
    assert norm["published:"] > norm["plain"]

"""Run an example as a user would, and import a study."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def run_example(script: str, folder: Path, *options: str, processes: int = 1) -> str:
    """What an example prints; it has to end well and to leave nothing behind in the empty `folder` it runs in."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    finished = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), EXAMPLES / script, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert list(folder.iterdir()) == []
    return finished.stdout


@contextmanager
def study(name: str) -> Iterator[ModuleType]:
    """Import a study, such as "studies.translation.run", and forget all studies afterwards."""
    try:
        yield importlib.import_module(name)
    finally:
        for other in [module for module in sys.modules if module.split(".")[0] == "studies"]:
            del sys.modules[other]

"""Write lock.txt: every package of `make install` with the SHA-256 of its files. Needs uv on the PATH.

python .ci/lock.py
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """\
# Every package of `make install`, direct and indirect, with the SHA-256 of its files, for Python 3.11 on Linux.
# Without torch and the CUDA packages that it brings: which build of torch is right depends on the machine. So:
#     pip install -c constraints.txt torch
#     pip install --require-hashes --no-deps -r lock.txt
#     pip install --no-deps -e .
# Written by `make lock`.
"""
OPTIONS = "--extra dev -c constraints.txt --generate-hashes --no-header --no-annotate --no-emit-index-url"
TARGET = "--python-version 3.11 --python-platform linux --no-emit-package torch --quiet"
WITH_TORCH = re.compile(r"(nvidia|cuda)-")  # packages that a CUDA build of torch brings


def main() -> None:
    """Let uv resolve the packages, and write them without those that belong to torch."""
    with tempfile.TemporaryDirectory() as folder:
        # The public torch wants the triton that it was built with; the pinned one is newer, and works.
        override = Path(folder) / "override.txt"
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        override.write_text("\n".join(pin for pin in pins if pin.startswith("triton==")) + "\n")
        written = Path(folder) / "lock.txt"
        words = [*OPTIONS.split(), *TARGET.split(), "--override", str(override), "-o", str(written)]
        subprocess.run(["uv", "pip", "compile", "pyproject.toml", *words], cwd=ROOT, check=True)
        packages = re.split(r"(?m)^(?=[A-Za-z0-9])", written.read_text())
    kept = [package for package in packages if package.strip() and not WITH_TORCH.match(package)]
    (ROOT / "lock.txt").write_text(HEADER + "".join(kept))
    print(f"lock.txt: {len(kept)} packages")


if __name__ == "__main__":
    main()

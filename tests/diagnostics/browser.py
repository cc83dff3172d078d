"""Running a page in a real browser, if there is one."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")


@dataclass(frozen=True)
class Seen:
    dom: str
    console: list[str]  # errors of scripts, and what the content security policy refused


def open_page(path: Path, fragment: str = "") -> Seen:
    """The document after its scripts have run."""
    assert CHROMIUM is not None
    flags = "--headless=new --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=1000 --enable-logging=stderr"
    profile = path.parent / "profile"
    finished = subprocess.run(
        [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", f"{path.as_uri()}#{fragment}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return Seen(finished.stdout, [line for line in finished.stderr.splitlines() if "CONSOLE" in line])

"""Take the screenshots of `gallery.md`: pages of the tutorial's two models, and a report on small classifiers.

    python docs/pictures/screenshots.py            # writes PNG files into this folder; a few minutes

It runs the tutorial's own code and the program's own commands in a temporary folder. Needs Chromium, playwright and
Pillow.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUTORIAL = HERE.parent / "tutorial.md"
SIZE = {"width": 1100, "height": 760}
COLOURS = 64  # of a PNG file, to keep it small
SMALL = {"data.folder": "data", "training.epochs": 4, "model.units": 24, "model.hidden": 24, "model.heads": 5}
METHODS = ("ma", "svgd")


def run_tutorial() -> None:
    """Run the Python blocks of the tutorial in the current folder."""
    namespace: dict[str, object] = {"__name__": "__tutorial__"}
    for block in re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S):
        exec(block, namespace)


def command(*words: object) -> None:
    """Run a command of the program in the current folder."""
    subprocess.run([sys.executable, "-m", "repulsive", *map(str, words)], check=True)


def make_pages() -> dict[str, Path]:
    """Make the pages in the current folder: name of the picture -> page."""
    run_tutorial()
    for name in ("before", "after"):
        command("inspect", name, "--text", "reviews.txt", "--ablate", "--out", f"{name}-page")
    command("prepare", "reviews", "--train", 2000, "--dev", 300, "--test", 400, "--out", "data")
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    command("train", *(f"reviews/{method}" for method in METHODS), "--seeds", 2, "--device", "cpu", *settings)
    folders = [next(Path("runs", "reviews").glob(f"{method}*")) for method in METHODS]
    command("report", *folders, "--out", "report.html", "--device", "cpu")
    pages = {f"inspect-{name}.png": Path(f"{name}-page", "inspect.html") for name in ("before", "after")}
    return pages | {"report.png": Path("report.html")}


def take(page: Path, picture: Path) -> None:
    """Open a page in Chromium and write a picture with few colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport=SIZE, color_scheme="light")
        opened.goto(page.resolve().as_uri())
        opened.wait_for_timeout(500)
        opened.screenshot(path=picture)
        browser.close()
    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, page in make_pages().items():
            take(page, out / name)
        os.chdir(out)


if __name__ == "__main__":
    main()

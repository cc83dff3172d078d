"""Open pages in a real browser, if one is installed."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")
needs_driver = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None, reason="needs a browser and playwright"
)
PATIENCE = 600.0  # seconds to wait for the browser; on a busy machine, too, only one that hangs takes longer


@dataclass(frozen=True)
class Seen:
    dom: str
    console: list[str]  # script errors and violations of the content security policy


def open_page(path: Path, fragment: str = "") -> Seen:
    """Return the document after its scripts have run."""
    assert CHROMIUM is not None
    flags = "--headless=new --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=1000 --enable-logging=stderr"
    profile = path.parent / "profile"
    finished = subprocess.run(
        [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", f"{path.as_uri()}#{fragment}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return Seen(finished.stdout, [line for line in finished.stderr.splitlines() if "CONSOLE" in line])


@contextmanager
def driven_browser() -> Iterator[Any]:
    """Start the installed browser under playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=1000 * PATIENCE
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def driven_page(browser: Any, path: Path, *, dark: bool = False, width: int = 1280) -> Iterator[tuple[Any, list[str]]]:
    """Open a page offline; yield it with its console messages and the URLs of other files that it requests."""
    context = browser.new_context(
        offline=True, color_scheme="dark" if dark else "light", viewport={"width": width, "height": 900}
    )
    context.set_default_timeout(1000 * PATIENCE)
    page, messages = context.new_page(), []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(path.as_uri()) else messages.append(request.url))
    try:
        page.goto(path.as_uri())
        yield page, messages
    finally:
        context.close()


def violations(browser: Any, path: Path, fragment: str = "", *, dark: bool = False, width: int = 1280) -> list[str]:
    """List the accessibility problems that axe-core finds."""
    axe = pytest.importorskip("axe_playwright_python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    context = browser.new_context(
        color_scheme="dark" if dark else "light", viewport={"width": width, "height": 900}, bypass_csp=True
    )
    context.set_default_timeout(1000 * PATIENCE)
    try:
        page = context.new_page()
        page.goto(f"{path.as_uri()}#{fragment}")
        page.evaluate(script)
        problems = page.evaluate("axe.run()")["violations"]
        return [f"{each['id']}: {node['html'][:120]}" for each in problems for node in each["nodes"]]
    finally:
        context.close()

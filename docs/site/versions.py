"""Build the site of one version beside those of others: `make docs VERSION=0.1.0` writes site/0.1.0.

The name of the site has the version. Material adds a menu of versions if the folder above has a versions.json, in
the format of the program mike; browsers read that file from a web server, not from disk.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import ConfigurationError

import repulsive

LATEST = "latest"  # the development state
INDEX = "index.html"
VERSIONS = "versions.json"


def on_config(config: Any) -> Any:
    """Move the site to the folder of its version, and put the version into its header.

    Raises:
        ConfigurationError: the checkout is another version, or is not a release.
    """
    version = _version()
    if version:
        if version != LATEST and not (version == repulsive.__version__ and _numbers(version)):
            raise ConfigurationError(
                f"VERSION={version}: expected {LATEST}, or the release that is checked out, got a checkout of "
                f"{repulsive.__version__}; check out the tag of the release first"
            )
        config.site_name = f"{config.site_name} {version}"
        config.extra["version"] = {"provider": "mike"}
        config.site_dir = str(Path(config.site_dir) / version)
    return config


def on_post_build(config: Any) -> None:
    """List all versions that were built, and open the newest one from the folder above unless it has a start page."""
    if not _version():
        return
    folder = Path(config.site_dir).parent
    built = [path.name for path in folder.iterdir() if (path / INDEX).is_file() and _numbers(path.name)]
    built.sort(key=_numbers, reverse=True)
    built += [LATEST] if (folder / LATEST / INDEX).is_file() else []
    entries = [{"version": version, "title": version, "aliases": []} for version in built]
    (folder / VERSIONS).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    start = folder / INDEX
    if not start.exists() or start.read_text(encoding="utf-8").startswith(_REDIRECT):
        start.write_text(f'{_REDIRECT}; url={built[0]}/{INDEX}">\n', encoding="utf-8")


_REDIRECT = '<!doctype html><meta charset="utf-8"><title>repulsive</title><meta http-equiv="refresh" content="0'


def _version() -> str:
    return os.environ.get("DOCS_VERSION", "")


def _numbers(name: str) -> tuple[int, ...]:
    """Read the numbers of a release such as 1.10.2; empty for other names."""
    return tuple(map(int, name.split("."))) if re.fullmatch(r"\d+(\.\d+)*", name) else ()

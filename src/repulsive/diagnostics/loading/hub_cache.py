"""Find models by name in the local Hugging Face cache. Only reads folders: nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[\w.-]{1,100}", re.ASCII)
_MAX_LISTED = 1_000  # models that are read to suggest a name


def is_model_name(text: str) -> bool:
    """Check if a text can be the name of a model on the Hub: "gpt2" or "organisation/name".

    Example:
        >>> is_model_name("sentence-transformers/all-MiniLM-L6-v2"), is_model_name("../model"), is_model_name("a/b/c")
        (True, False, False)
    """
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def cache_folder() -> Path:
    """Return the folder of the cache: `HF_HUB_CACHE`, or "hub" in `HF_HOME`, or its default in the home folder."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def cached_model(name: str) -> Path | None:
    """Return the snapshot folder of a model that was downloaded before; None if there is none with a config.json.

    Args:
        name: name on the Hub. The snapshot is that of its main branch, or the only one.
    """
    if not is_model_name(name):
        return None
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        candidates = [folder / "snapshots" / revision] if _REVISION.fullmatch(revision) and revision != ".." else []
    except (OSError, UnicodeDecodeError):
        snapshots = folder / "snapshots"
        candidates = list(snapshots.iterdir()) if snapshots.is_dir() else []
    usable = [each for each in candidates if (each / "config.json").is_file()]
    return usable[0] if len(usable) == 1 else None


def cached_names() -> list[str]:
    """List the names of the models in the cache, to suggest one for a name that was misspelt."""
    folder = cache_folder()
    if not folder.is_dir():
        return []
    names = [each.name.removeprefix("models--").replace("--", "/", 1) for each in folder.glob("models--*")]
    return sorted(name for name in names if is_model_name(name))[:_MAX_LISTED]

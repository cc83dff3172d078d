"""Import an object by its path, `package.module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from repulsive.errors import RepulsiveError, short_message


class LoadError(RepulsiveError, ValueError):
    """Error for a model or inputs that cannot be loaded: a typo, a missing file or package, or a wrong type."""


def import_object(path: str) -> Any:
    """Import an object, with the current directory on the module search path.

    Args:
        path: `package.module:name`; the name may be dotted.

    Raises:
        LoadError: there is no such module or object, or the import fails.
    """
    module, _, dotted = path.partition(":")
    if not module or not dotted:
        raise LoadError(f"{path!r} is not a complete import path; write package.module:name")
    value: Any = _import_module(module)
    parent = module
    for name in dotted.split("."):
        if not hasattr(value, name):
            public = [each for each in dir(value) if not each.startswith("_")]
            raise LoadError(f"{parent} has no {name!r}{suggest(name, public)}")
        value, parent = getattr(value, name), f"{parent}.{name}"
    return value


def _import_module(name: str) -> object:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            files = [file.stem for file in Path(here).glob("*.py")]
            raise LoadError(f"no module {error.name!r} here or installed{suggest(error.name, files)}") from error
        raise LoadError(f"module {name} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise LoadError(f"importing {name} failed: {short_message(error)}") from error


def suggest(word: str, choices: Iterable[str]) -> str:
    """Hint at the most similar choice: " (did you mean 'x'?)"; "" if none is similar."""
    matches = get_close_matches(word, list(choices), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""

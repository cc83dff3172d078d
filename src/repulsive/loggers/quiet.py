"""Keep other packages quiet and offline within a block."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from repulsive.errors import ConfigError
from repulsive.extras import install_command


def import_package(module: str, distribution: str = "") -> ModuleType:
    """Import an optional package.

    Args:
        module: name of the module.
        distribution: name of the package to install, if it is another.

    Raises:
        ConfigError: the package is not installed, or cannot be imported.
    """
    require_package(module.partition(".")[0], distribution or module)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"logger {module!r}: cannot be imported ({reason}); update {distribution or module}"
        ) from None


def require_package(module: str, distribution: str) -> None:
    """Raise `ConfigError` if an optional package is not installed, without importing it."""
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a broken or half-imported package
        is_installed = False
    if not is_installed:
        raise ConfigError(f"logger {module!r}: {distribution} is not installed; run: {install_command('loggers')}")


@contextlib.contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Change environment variables within a block; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """Stop huggingface_hub from using the network within a block."""
    constants = sys.modules.get("huggingface_hub.constants")
    before = getattr(constants, "HF_HUB_OFFLINE", None)
    if constants is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if constants is not None:
            constants.HF_HUB_OFFLINE = before  # type: ignore[attr-defined]


@contextlib.contextmanager
def no_output() -> Iterator[None]:
    """Discard what is printed within a block."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield

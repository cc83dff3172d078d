"""From what a user types to an `nn.Module`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repulsive.errors import ConfigError, RepulsiveError
from repulsive.safety.model_folders import read_config, with_attention


class TargetError(RepulsiveError, ValueError):
    """The target names no model: a typo, a missing file or package, or an object that is not a model."""


def load_model(target: str) -> nn.Module:
    """The model a target names.

    Args:
        target: `package.module:name`, imported with the current directory on the path; or a folder with a
            transformers `config.json`.

    Returns:
        The model. From a folder it has no weights: its parameters are on the meta device where the architecture
        allows that.

    Raises:
        TargetError: with what was wrong and what to write instead.
    """
    path = Path(target)
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return _from_folder(path)
    if ":" in target:
        return _from_object(target)
    raise TargetError(
        f"no folder {target!r}{_near(target, _siblings(path))}; write a folder with a config.json, "
        "or package.module:name (models are never downloaded)"
    )


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise TargetError(f"folder {str(folder)!r} has no config.json; point at the folder that holds it")
    try:
        from transformers import AutoModel
    except ImportError:
        raise TargetError("a config.json needs transformers: pip install 'repulsive[transformers]'") from None
    try:
        config = read_config(folder)
    except ConfigError:
        raise
    except Exception as error:
        raise TargetError(f"cannot read {str(folder / 'config.json')!r}: {_brief(error)}") from error

    def build() -> nn.Module:
        return with_attention(
            config, lambda name: AutoModel.from_config(config, trust_remote_code=False, attn_implementation=name)
        )

    try:
        with torch.device("meta"):  # shapes are enough, whatever the size of the model
            return build()
    except Exception:  # some architectures compute with tensors while they are built: give them real ones
        try:
            return build()
        except Exception as error:
            raise TargetError(f"cannot build the model of {str(folder)!r}: {_brief(error)}") from error


def _from_object(target: str) -> nn.Module:
    module_name, _, dotted = target.partition(":")
    if not module_name or not dotted:
        raise TargetError(f"{target!r} is half a target; write package.module:name")
    found: Any = _import(module_name)
    walked = module_name
    for name in dotted.split("."):
        if not hasattr(found, name):
            raise TargetError(f"{walked} has no {name!r}{_near(name, _public(found))}")
        found, walked = getattr(found, name), f"{walked}.{name}"
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise TargetError(f"{target} is {_kind(found)}; name an nn.Module or something that builds one")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(
            f"{target} cannot be called without arguments ({error}); name a function that needs none"
        ) from error
    except ValueError:  # no signature to read: the call itself will tell
        pass
    try:
        built = found()
    except Exception as error:
        raise TargetError(f"calling {target} failed: {_brief(error)}") from error
    if not isinstance(built, nn.Module):
        raise TargetError(f"calling {target} gave {_kind(built)}; it must give an nn.Module")
    return built


def _import(name: str) -> object:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            files = [p.stem for p in Path(here).glob("*.py")]
            raise TargetError(f"no module {error.name!r} here or installed{_near(error.name, files)}") from error
        raise TargetError(f"module {name} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise TargetError(f"importing {name} failed: {_brief(error)}") from error


def _public(value: object) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


def _siblings(path: Path) -> list[str]:
    return [str(p) for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []


def _near(word: str, known: Iterable[str]) -> str:
    matches = get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _brief(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__

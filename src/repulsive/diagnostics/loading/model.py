"""Load a model by folder, name in the Hugging Face cache or import path, with weights or only its architecture."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.loading.hub_cache import cached_model, cached_names, is_model_name
from repulsive.diagnostics.loading.import_path import LoadError, import_object, suggest
from repulsive.diagnostics.prune import PRUNED, load_pruned
from repulsive.errors import ConfigError, short_message
from repulsive.extras import install_command
from repulsive.safety.model_folders import check_size, offline, read_config, with_attention

_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its tokenizer and folder.

    Args:
        model: the model.
        tokenizer: its tokenizer; None if the folder has none, or the model was imported.
        folder: its folder; None if the model was imported.
        revision: commit of a model from the Hugging Face cache; "" for other models.
    """

    model: nn.Module
    tokenizer: Any = None
    folder: Path | None = None
    revision: str = ""


def load_architecture(source: str) -> nn.Module:
    """Load a model without its weights, which is enough to find its heads.

    Args:
        source: a folder with a transformers `config.json`; the name of a model in the local Hugging Face cache; or
            `package.module:name`, imported with the current directory on the module search path.

    Returns:
        The model. From a folder, its parameters are on the meta device if the architecture supports that.

    Raises:
        LoadError: the model cannot be loaded; the message says why and what to write instead.
    """
    path = Path(source)
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return _architecture_from_folder(path)
    if ":" in source:
        return _model_from_import_path(source)
    if (snapshot := cached_model(source)) is not None:
        return _architecture_from_folder(snapshot)
    if path.is_file():
        raise LoadError(f"{source!r} is a file; name a folder with a config.json, or package.module:name")
    siblings = [str(each) for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    expected = "write a folder with a config.json, or package.module:name (models are never downloaded)"
    if is_model_name(source):
        hint = suggest(source, [*siblings, *cached_names()])
        raise LoadError(
            f"no folder {source!r} and no model of this name in the Hugging Face cache{hint}; fetch it with: "
            f"hf download {source}; or {expected}"
        )
    raise LoadError(f"no folder {source!r}{suggest(source, siblings)}; {expected}")


def load_model(source: str, *, random: bool = False) -> LoadedModel:
    """Load a model with its weights and its tokenizer.

    Args:
        source: a folder with a transformers `config.json`, weights and a tokenizer; the name of a model in the local
            Hugging Face cache; or `package.module:name`.
        random: initialise the model of a folder randomly instead of loading weights.

    Raises:
        LoadError: there is no model, or the folder has no weights and `random` is False.
    """
    folder = Path(source).parent if Path(source).name == "config.json" else Path(source)
    snapshot = None if folder.exists() or ":" in source else cached_model(source)
    folder = folder if snapshot is None else snapshot
    if folder.is_dir() and [*folder.glob("recipe.json"), *folder.glob("seed-*/recipe.json")]:
        raise LoadError(f"{str(folder)!r} is a training run; inspect it with: repulsive report {folder}")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        return LoadedModel(load_architecture(source))
    transformers, config = _import_transformers(), _read_config(folder)
    model_class = _model_class(transformers, config)

    def build(attention: str) -> Any:
        config._attn_implementation = attention
        if model_class is transformers.AutoModel:
            return model_class.from_config(config, attn_implementation=attention)
        return model_class(config)

    def from_pretrained(attention: str) -> Any:
        return model_class.from_pretrained(
            str(folder),
            output_loading_info=True,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
        )

    info: dict[str, Any] = {}
    try:
        check_size(config, build, folder / "config.json")
        if random:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = with_attention(config, build)
        elif (folder / PRUNED).is_file():
            model = load_pruned(with_attention(config, build), folder)
        elif [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
            with _progress_bars_at_a_terminal_only(transformers):
                model, info = with_attention(config, from_pretrained)
        else:
            fetch = "" if snapshot is None else f"fetch them with: hf download {source}; "
            raise LoadError(f"{str(folder)!r} has a config.json but no weights; {fetch}--random uses random weights")
    except (LoadError, ConfigError):
        raise
    except Exception as error:
        raise LoadError(f"cannot load the model of {str(folder)!r}: {short_message(error)}") from error
    _check_missing(model, sorted(info.get("missing_keys") or ()), folder)
    revision = "" if snapshot is None else snapshot.name
    return LoadedModel(model, _load_tokenizer(transformers, folder), folder, revision)


def _check_missing(model: Any, missing: list[str], folder: Path) -> None:
    """Raise an error if the folder lacks parameters of the model; a missing pooler is removed."""
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None  # self-supervised checkpoints, such as those of DINO, have none; attention does not use it
    elif missing:
        raise LoadError(
            f"the weights of {str(folder)!r} lack {len(missing)} parameters, such as {missing[0]}, which would be "
            "random; --random uses random weights for the whole model"
        )


def _architecture_from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise LoadError(f"folder {str(folder)!r} has no config.json; name the folder that contains it")
    transformers, config = _import_transformers(), _read_config(folder)

    def from_config(attention: str) -> Any:
        kind = _model_class(transformers, config)  # so that heads have the names that they have in the saved model
        if kind is transformers.AutoModel:
            return kind.from_config(config, trust_remote_code=False, attn_implementation=attention)
        return kind._from_config(config, attn_implementation=attention)

    try:
        with torch.device("meta"):  # shapes are enough, and models of any size fit
            return with_attention(config, from_config)
    except Exception:  # some architectures compute with tensors in the constructor, and need real tensors
        try:
            return with_attention(config, from_config)
        except Exception as error:
            raise LoadError(f"cannot build the model of {str(folder)!r}: {short_message(error)}") from error


def _model_from_import_path(path: str) -> nn.Module:
    value = import_object(path)
    if isinstance(value, nn.Module):
        return value
    if not callable(value):
        raise LoadError(f"{path} is {_type_of(value)}; name an nn.Module or a function that builds one")
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise LoadError(
            f"{path} cannot be called without arguments ({error}); name a function that needs none"
        ) from error
    except ValueError:  # without a signature: try the call
        pass
    try:
        model = value()
    except Exception as error:
        raise LoadError(f"calling {path} failed: {short_message(error)}") from error
    if not isinstance(model, nn.Module):
        raise LoadError(f"calling {path} returned {_type_of(model)}; it must return an nn.Module")
    return model


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise LoadError(f"a config.json needs transformers: {install_command('transformers')}") from None
    return transformers


@contextmanager
def _progress_bars_at_a_terminal_only(transformers: Any) -> Iterator[None]:
    """Hide the progress bars of transformers while a model is loaded, unless stderr is a terminal."""
    logging = transformers.utils.logging
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _read_config(folder: Path) -> Any:
    try:
        return read_config(folder)
    except ConfigError:
        raise
    except Exception as error:
        raise LoadError(f"cannot read {str(folder / 'config.json')!r}: {short_message(error)}") from error


def _model_class(transformers: Any, config: Any) -> Any:
    """Return the class that saved the folder, so that all saved weights are loaded and no random weights are added."""
    names = getattr(config, "architectures", None)
    classes = [getattr(transformers, name, None) for name in names or [] if isinstance(name, str)]
    models = [each for each in classes if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel)]
    return models[0] if models else transformers.AutoModel


def _load_tokenizer(transformers: Any, folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with offline():
            return transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise LoadError(f"cannot read the tokenizer of {str(folder)!r}: {short_message(error)}") from error


def _type_of(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"

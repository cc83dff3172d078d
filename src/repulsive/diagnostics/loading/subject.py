"""From what a user types to a model with weights, and to batches it can read."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.loading.target import TargetError, _brief, _import, load_model
from repulsive.diagnostics.prune import PRUNED, load_pruned
from repulsive.errors import ConfigError, DataError
from repulsive.safety.model_folders import check_size, offline, read_config, with_attention

BATCH = 8  # sentences: enough to keep a CPU busy, few enough for a small memory


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to look at; the tokenizer is None for a model by import path."""

    model: nn.Module
    tokenizer: Any = None


@dataclass(frozen=True, eq=False)
class Reading:
    """Batches a model can read, and the tokens of each sentence in the order of the batches.

    Where `twice`, the decoder of an encoder-decoder reads the same sentences as its encoder.
    """

    batches: list[dict[str, Any]]
    tokens: list[list[str]]
    twice: bool = False


def load_subject(target: str, *, random: bool = False) -> Subject:
    """The model a target names, with its weights.

    Args:
        target: a folder with a transformers `config.json`, weights and a tokenizer; or `package.module:name`.
        random: take a folder without weights, and fill the model at random.

    Raises:
        TargetError: there is no model, or a folder has no weights and `random` was not said.
    """
    folder = Path(target).parent if Path(target).name == "config.json" else Path(target)
    if folder.is_dir() and [*folder.glob("recipe.json"), *folder.glob("seed-*/recipe.json")]:
        raise TargetError(f"{str(folder)!r} is a run of this package; see inside it with: repulsive report {folder}")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        return Subject(load_model(target))
    try:
        import transformers
    except ImportError:
        raise TargetError("a config.json needs transformers: pip install 'repulsive[transformers]'") from None
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = read_config(folder)
    except ConfigError:
        raise
    except Exception as error:
        raise TargetError(f"cannot read {str(folder / 'config.json')!r}: {_brief(error)}") from error
    kind = _class_of(transformers, config)
    saved = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    info: dict[str, Any] = {}

    def build(name: str) -> Any:
        config._attn_implementation = name
        return kind.from_config(config, attn_implementation=name) if kind is transformers.AutoModel else kind(config)

    try:
        check_size(config, build, folder / "config.json")
        if random:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = with_attention(config, build)
        elif (folder / PRUNED).is_file():
            model = load_pruned(with_attention(config, build), folder)
        elif saved:
            model, info = with_attention(
                config,
                lambda name: kind.from_pretrained(
                    str(folder), output_loading_info=True, attn_implementation=name, **local
                ),
            )
        else:
            raise TargetError(f"{str(folder)!r} has a config.json but no weights; --random fills the model at random")
    except (TargetError, ConfigError):
        raise
    except Exception as error:
        raise TargetError(f"cannot load the model of {str(folder)!r}: {_brief(error)}") from error
    if info.get("missing_keys"):
        missing = sorted(info["missing_keys"])
        raise TargetError(
            f"the weights of {str(folder)!r} lack {len(missing)} parameters, such as {missing[0]}, which "
            "would be random; --random fills the whole model at random"
        )
    return Subject(model, _tokenizer(transformers, folder, local))


def read_sentences(path: Path | None, given: Sequence[str], most: int) -> list[str]:
    """Sentences of a file, one a line, and of the command line; blank ones do not count.

    Raises:
        DataError: the file cannot be read, or nothing is left.
    """
    lines = list(given)
    if path is not None:
        try:
            lines += path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {str(path)!r}: {_brief(error)}") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found and (path is not None or given):
        raise DataError(f"{str(path) if path else '--sentence'!r} has no sentence: give one a line")
    return found[:most]


def _places(model: nn.Module) -> list[int]:
    """Positions that a model has: what its configuration says, and fewer where numbers begin after that of padding."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    starts = [m.padding_idx for m in tables if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    known = getattr(model.config, "max_position_embeddings", None)
    return [known - max([-1, *starts]) - 1] if isinstance(known, int) else []


def tokenized(subject: Subject, sentences: Sequence[str], length: int) -> Reading:
    """Sentences as batches, shortest first, cut at `length` tokens.

    Raises:
        DataError: there is no tokenizer, or it does not belong to the model.
    """
    tokenizer, model = subject.tokenizer, subject.model
    if tokenizer is None:
        raise DataError("text needs a model folder with a tokenizer (tokenizer.json); for other models use --example")
    config = model.config
    longest = [length, *_places(model), tokenizer.model_max_length]
    most = min(size for size in longest if isinstance(size, int) and size > 0)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    size = BATCH if tokenizer.pad_token is not None else 1
    ordered = sorted(sentences, key=lambda text: (len(text), text))
    taken = inspect.signature(model.forward).parameters
    twice = bool(getattr(config, "is_encoder_decoder", False))
    batches, tokens = [], []
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        made = tokenizer(part, return_tensors="pt", padding=size > 1, truncation=True, max_length=most)
        batch = {name: value for name, value in made.items() if name in taken}
        if "input_ids" not in batch:
            wanted = model.main_input_name if isinstance(model.main_input_name, str) else "other inputs"
            raise DataError(f"{type(model).__name__} reads {wanted}, not text; give it inputs with --example")
        _check_ids(model, batch["input_ids"])
        mask = made.get("attention_mask", torch.ones_like(batch["input_ids"]))
        tokens += [
            tokenizer.convert_ids_to_tokens(ids[real.bool()].tolist())
            for ids, real in zip(batch["input_ids"], mask, strict=True)
        ]
        if twice:
            batch["decoder_input_ids"] = batch["input_ids"]
            if "decoder_attention_mask" in taken and "attention_mask" in batch:
                batch["decoder_attention_mask"] = batch["attention_mask"]
        batches.append(batch)
    return Reading(batches, tokens, twice)


def example_inputs(name: str, model: nn.Module) -> Any:
    """Inputs by import path: `package.module:name` of a tensor, tuple or mapping, or of a function that makes them.

    Raises:
        TargetError: there are none of that name, or the model does not run on them.
    """
    module_name, _, dotted = name.partition(":")
    if not module_name or not dotted:
        raise TargetError(f"--example {name!r}: write package.module:name")
    found: Any = _import(module_name)
    for part in dotted.split("."):
        if not hasattr(found, part):
            raise TargetError(f"--example: {module_name} has no {dotted!r}")
        found = getattr(found, part)
    try:
        inputs = found() if callable(found) else found
        with torch.no_grad(), evaluating(model):
            call(model, inputs)
    except Exception as error:
        raise TargetError(f"the model does not run on --example {name}: {_brief(error)}") from error
    return inputs


def _class_of(transformers: Any, config: Any) -> Any:
    """The class that wrote the folder, so that no part of it is left out or made up."""
    names = getattr(config, "architectures", None)
    known = [getattr(transformers, name, None) for name in names or [] if isinstance(name, str)]
    models = [kind for kind in known if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
    return models[0] if models else transformers.AutoModel


def _tokenizer(transformers: Any, folder: Path, local: dict[str, bool]) -> Any:
    known = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
    if not any((folder / name).is_file() for name in known):
        return None
    try:
        with offline():
            return transformers.AutoTokenizer.from_pretrained(str(folder), **local)
    except Exception as error:
        raise TargetError(f"cannot read the tokenizer of {str(folder)!r}: {_brief(error)}") from error


def _check_ids(model: nn.Module, ids: torch.Tensor) -> None:
    words = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if not ids.numel():
        raise DataError("the tokenizer makes no token of some of the sentences; give others")
    if int(ids.max()) >= words:
        raise DataError(
            f"the tokenizer gives token {int(ids.max())} but the model knows {words}; use its own tokenizer"
        )

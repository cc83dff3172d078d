"""Where fine-tuning starts: a folder of the package transformers, a finished run of fine-tuning, or random weights."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from repulsive.errors import ConfigError
from repulsive.lab.engine.runs import RECIPE, RunFolder
from repulsive.lab.systems.glue.model import Head, fill_encoder, load_encoder, make_encoder, weights_file
from repulsive.lab.text.wordpiece import FILE as VOCABULARY

CONFIG = "config.json"
EXPORT = "export"  # what pre-training leaves in its run's folder


@dataclass(frozen=True)
class Model:
    """The encoder to start from, and the head.

    Args:
        start: a folder with `config.json` and weights, as the package transformers writes it, or a finished run: of
            fine-tuning, for intermediate training, or of pre-training, which has such a folder, `export`, inside.
            "{seed}" in it stands for the recipe's seed. None: random weights.
        size: of random weights.
        head: "linear" is the official ELECTRA code's, "dense" that of the package transformers.
        dropout: everywhere.
    """

    start: Path | None = None
    size: Literal["tiny", "small", "base"] = "small"
    head: Head = "linear"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


def at_seed(model: Model, seed: int) -> Model:
    """The table with the seed where `start` has "{seed}"."""
    if model.start is None:
        return model
    return replace(model, start=Path(str(model.start).replace("{seed}", str(seed))))


def encoder_of(model: Model, vocabulary: int) -> nn.Module:
    """The encoder a recipe starts from.

    Args:
        model: the recipe's table.
        vocabulary: pieces in the data.

    Raises:
        ConfigError: there is nothing to start from where it says, or it does not fit.
    """
    if model.start is None:
        return make_encoder(model.size, vocabulary, model.dropout)
    folder, run = _found(model.start)
    if run is None:
        encoder = load_encoder(folder, model.dropout)
    else:
        encoder = encoder_of(_model_of(run, model.dropout), _pieces_of(run))
        fill_encoder(encoder, _best(run), str(folder))
    has = int(encoder.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if has < vocabulary:
        raise ConfigError(f"model.start={model.start}: knows {has:,} pieces, and the data have {vocabulary:,}")
    return encoder


def checksums_of(model: Model, vocabulary: bytes) -> dict[str, str]:
    """SHA-256 of what a recipe starts from; the pieces must be those of the data where it says which it has.

    Args:
        model: the recipe's table.
        vocabulary: the file of the data's pieces.

    Raises:
        ConfigError: there is nothing to start from where it says, or its pieces are others.
    """
    if model.start is None:
        return {}
    own = hashlib.sha256(vocabulary).hexdigest()
    folder, run = _found(model.start)
    if run is None:
        files = [folder / CONFIG, weights_file(folder)]
        theirs = _pieces_digest(folder / VOCABULARY) if (folder / VOCABULARY).is_file() else own
    else:
        _best(run)
        files = [path for path in sorted((folder / "best").rglob("*")) if path.suffix == ".safetensors"]
        theirs = _facts(run).get(VOCABULARY, own)
    if theirs != own:
        raise ConfigError(f"model.start={model.start}: has other pieces than the data; prepare with its vocabulary")
    return {f"start/{path.relative_to(folder).as_posix()}": _digest(path) for path in files}


def _found(start: Path) -> tuple[Path, RunFolder | None]:
    """The folder, and the run it is, if it is one of fine-tuning."""
    for folder in (start, start / EXPORT):
        if (folder / CONFIG).is_file():
            return folder, None
    if (start / RECIPE).is_file():
        run = RunFolder(start)
        if run.recipe.get("task") == "glue":
            return start, run
        raise ConfigError(f"model.start={start}: is a run of {run.recipe.get('task')!r} without {EXPORT}/{CONFIG}")
    told = "" if start.name.startswith("seed-") else "; a run's folder ends with seed-N"
    others = sorted(start.parent.parent.glob(f"{glob.escape(start.parent.name)}+*/{glob.escape(start.name)}/{RECIPE}"))
    if others:  # settings given with --set are part of a folder's name
        told = f"; did you mean {others[0].parent}?"
    raise ConfigError(f"model.start={start}: holds neither {CONFIG} of a model nor {RECIPE} of a run{told}")


def _model_of(run: RunFolder, dropout: float) -> Model:
    table: Mapping[str, Any] = run.recipe["model"]
    start = table.get("start")
    return at_seed(Model(Path(start) if start else None, table["size"], table["head"], dropout), run.recipe["seed"])


def _pieces_of(run: RunFolder) -> int:
    weights = _best(run)
    return len(weights["encoder.embeddings.word_embeddings.weight"])


def _best(run: RunFolder) -> Mapping[str, Any]:
    found = run.best.latest()
    if found is None:
        raise ConfigError(f"model.start={run.path}: the run has not ended; train it to its end first")
    weights: Mapping[str, Any] = found[1]["model"]
    return weights


def _facts(run: RunFolder) -> Mapping[str, str]:
    found: Mapping[str, str] = run.facts.get("data", {})
    return found


def _pieces_digest(path: Path) -> str:
    """Of a vocabulary as prepared folders have it, whatever ends its lines."""
    lines = path.read_bytes().replace(b"\r\n", b"\n").removesuffix(b"\n")
    return hashlib.sha256(lines + b"\n").hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

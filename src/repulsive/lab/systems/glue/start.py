"""Initial weights for fine-tuning: a folder written by transformers, a finished fine-tuning run, or random weights."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from repulsive.errors import ConfigError
from repulsive.lab.engine.run_reader import RECIPE
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.glue.model import Head, fill_encoder, load_encoder, make_encoder, weights_file
from repulsive.lab.text.folders import digest
from repulsive.lab.text.wordpiece import FILE as VOCABULARY

CONFIG = "config.json"
EXPORT = "export"  # subfolder of a pre-training run


@dataclass(frozen=True)
class Model:
    """The encoder to start from, and the head.

    Args:
        start: a folder with `config.json` and weights, as transformers writes it, or a finished run: of fine-tuning,
            for intermediate training, or of pre-training with a subfolder `export`. "{seed}" in it is replaced by the
            recipe's seed. None: random weights.
        size: size of an encoder with random weights.
        head: "linear" as in the official ELECTRA code, "dense" as in transformers.
        dropout: dropout probability of encoder and head.
    """

    start: Path | None = None
    size: Literal["tiny", "small", "base"] = "small"
    head: Head = "linear"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


def fill_in_seed(model: Model, seed: int) -> Model:
    """Replace "{seed}" in `start` by the seed."""
    if model.start is None:
        return model
    return replace(model, start=Path(str(model.start).replace("{seed}", str(seed))))


def encoder_of(model: Model, vocabulary: int) -> nn.Module:
    """Make the encoder with its initial weights.

    Args:
        model: the `[model]` table of the recipe.
        vocabulary: number of pieces in the data.

    Raises:
        ConfigError: `start` holds no weights, or they do not fit.
    """
    if model.start is None:
        return make_encoder(model.size, vocabulary, model.dropout)
    folder, run = _locate(model.start)
    if run is None:
        encoder = load_encoder(folder, model.dropout)
    else:
        encoder = encoder_of(_model_of(run, model.dropout), _pieces_of(run))
        fill_encoder(encoder, _best(run), str(folder))
    size = int(encoder.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if size < vocabulary:
        raise ConfigError(f"model.start={model.start}: has {size:,} pieces, and the data have {vocabulary:,}")
    return encoder


def checksums_of(model: Model, vocabulary: bytes) -> dict[str, str]:
    """Compute the SHA-256 of the initial weights, and check that their vocabulary, if present, is that of the data.

    Args:
        model: the `[model]` table of the recipe.
        vocabulary: content of the data's vocabulary file.

    Raises:
        ConfigError: `start` holds no weights, or has another vocabulary.
    """
    if model.start is None:
        return {}
    own = hashlib.sha256(vocabulary).hexdigest()
    folder, run = _locate(model.start)
    if run is None:
        files = [folder / CONFIG, weights_file(folder)]
        theirs = _pieces_digest(folder / VOCABULARY) if (folder / VOCABULARY).is_file() else own
    else:
        _best(run)
        files = [path for path in sorted((folder / "best").rglob("*")) if path.suffix == ".safetensors"]
        theirs = _checksums(run).get(VOCABULARY, own)
    if theirs != own:
        raise ConfigError(f"model.start={model.start}: has another vocabulary than the data; prepare them with its own")
    return {f"start/{path.relative_to(folder).as_posix()}": digest(path) for path in files}


def _locate(start: Path) -> tuple[Path, RunFolder | None]:
    """Find the folder with the weights, and its run if the weights come from a fine-tuning run."""
    for folder in (start, start / EXPORT):
        if (folder / CONFIG).is_file():
            return folder, None
    if (start / RECIPE).is_file():
        run = RunFolder(start)
        if run.recipe.get("task") == "glue":
            return start, run
        raise ConfigError(f"model.start={start}: is a run of {run.recipe.get('task')!r} without {EXPORT}/{CONFIG}")
    hint = "" if start.name.startswith("seed-") else "; a run's folder ends with seed-N"
    others = sorted(start.parent.parent.glob(f"{glob.escape(start.parent.name)}+*/{glob.escape(start.name)}/{RECIPE}"))
    if others:  # settings given with --set are part of a folder's name
        hint = f"; did you mean {others[0].parent}?"
    raise ConfigError(f"model.start={start}: holds neither {CONFIG} of a model nor {RECIPE} of a run{hint}")


def _model_of(run: RunFolder, dropout: float) -> Model:
    table: Mapping[str, Any] = run.recipe["model"]
    start = table.get("start")
    return fill_in_seed(
        Model(Path(start) if start else None, table["size"], table["head"], dropout), run.recipe["seed"]
    )


def _pieces_of(run: RunFolder) -> int:
    weights = _best(run)
    return len(weights["encoder.embeddings.word_embeddings.weight"])


def _best(run: RunFolder) -> Mapping[str, Any]:
    latest = run.best.latest()
    if latest is None:
        raise ConfigError(f"model.start={run.path}: the run has not finished; train it to the end first")
    weights: Mapping[str, Any] = latest[1]["model"]
    return weights


def _checksums(run: RunFolder) -> Mapping[str, str]:
    checksums: Mapping[str, str] = run.facts.get("data", {})
    return checksums


def _pieces_digest(path: Path) -> str:
    """Compute the SHA-256 of a vocabulary, with line ends as prepared folders write them."""
    lines = path.read_bytes().replace(b"\r\n", b"\n").removesuffix(b"\n")
    return hashlib.sha256(lines + b"\n").hexdigest()

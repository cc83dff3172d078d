"""A pre-trained model as a folder that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import RunError
from repulsive.lab.engine.tables import runs_in
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.electra.model import GENERATOR, Electra, MaskedModel, quietly
from repulsive.lab.text.wordpiece import CLS, PADDING, SEP, UNKNOWN, WordPieces
from repulsive.lab.text.wordpiece import FILE as VOCABULARY
from repulsive.safety.folders import replacing

_MASK = "[MASK]"


def export(run: Path, out: Path) -> list[Path]:
    """Write what a run of pre-training ended with.

    Args:
        run: its folder, or that of its only seed.
        out: the folder to make: the discriminator, or the model of BERT's objective, with its tokenizer; and in
            `generator` below it the generator.

    Returns:
        The folders of models.

    Raises:
        RunError: the run has not ended or is of another task, or the folder is there already or cannot be written.
    """
    found = runs_in(run)
    if len(found) != 1:
        told = f"has seeds {', '.join(map(str, found))}: name one of their folders" if found else "is no run folder"
        raise RunError(f"{run}: {told}; `repulsive ls` lists runs")
    (folder,) = found.values()
    if folder.recipe.get("task") != "electra":
        raise RunError(f"{folder.path}: is a run of {folder.recipe.get('task')}; only pre-training is exported")
    if folder.result is None:
        raise RunError(f"{folder.path}: has not ended; the command that began it goes on")
    check_free(out)
    task, model = load_run(folder, torch.device("cpu"))
    return save_model(model, task.data.pieces, out)  # type: ignore[attr-defined]


def check_free(out: Path) -> None:
    """Raise `RunError` unless a folder can be made there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: is there already; choose another --out")


def save_model(model: Any, pieces: WordPieces, out: Path) -> list[Path]:
    """Write a model of pre-training, whole or not at all.

    Args:
        model: what a task of pre-training made.
        pieces: its vocabulary.
        out: the folder to make, as `export` has it.

    Returns:
        The folders of models.

    Raises:
        RunError: the folder is there already or cannot be written.
    """
    from safetensors import SafetensorError

    check_free(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as aside:
            places = {aside: _main(model)}
            if isinstance(model, Electra):
                places[aside / GENERATOR] = model.generator
            for place, network in places.items():
                with quietly():
                    network.save_pretrained(place)
                save_tokenizer(pieces, place, network.config.max_position_embeddings)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror}: {error.filename})") from None
    except SafetensorError as error:  # a full disk, as safetensors tells it
        raise RunError(f"{out}: cannot be written ({error})") from None
    return [out / place.relative_to(aside) for place in places]


def save_tokenizer(pieces: WordPieces, folder: Path, longest: int) -> None:
    """The files `AutoTokenizer` reads.

    Args:
        pieces: the vocabulary.
        folder: of the model.
        longest: pieces that the model takes.
    """
    marks = {"pad": PADDING, "unk": UNKNOWN, "cls": CLS, "sep": SEP, "mask": _MASK}
    told: dict[str, Any] = {f"{name}_token": mark for name, mark in marks.items()}
    told |= {"tokenizer_class": "BertTokenizer", "do_lower_case": pieces.lowercase, "model_max_length": longest}
    (folder / VOCABULARY).write_bytes(pieces.as_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def _main(model: Any) -> Any:
    assert isinstance(model, Electra | MaskedModel)
    return model.discriminator if isinstance(model, Electra) else model.network

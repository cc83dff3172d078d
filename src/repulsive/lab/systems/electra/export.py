"""Export a pre-trained model as a folder that the package transformers can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from repulsive.errors import RunError, os_reason
from repulsive.lab.systems.electra.model import GENERATOR, Electra, MaskedModel, without_progress_bars
from repulsive.lab.text.wordpiece import CLS, PADDING, SEP, UNKNOWN, WordPieces
from repulsive.lab.text.wordpiece import FILE as VOCABULARY
from repulsive.safety.folders import replacing
from repulsive.safety.permissions import ordinary_permissions

_MASK = "[MASK]"


def check_free(out: Path) -> None:
    """Raise `RunError` if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: exists already; choose another --out")


def save_model(model: Any, pieces: WordPieces, out: Path) -> list[Path]:
    """Write a pre-trained model, atomically.

    Args:
        model: an `Electra` or a `MaskedModel`.
        pieces: the vocabulary of the model.
        out: the folder to make. It holds the discriminator, or the masked language model, and its tokenizer; the
            generator goes into the subfolder `generator`.

    Returns:
        The folders of the written models.

    Raises:
        RunError: the folder exists already or cannot be written.
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
                with without_progress_bars(), ordinary_permissions(place):
                    network.save_pretrained(place)
                save_tokenizer(pieces, place, network.config.max_position_embeddings)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({os_reason(error)})") from None
    except SafetensorError as error:  # how safetensors reports a full disk
        raise RunError(f"{out}: cannot be written ({error})") from None
    return [out / place.relative_to(aside) for place in places]


def save_tokenizer(pieces: WordPieces, folder: Path, longest: int) -> None:
    """Write the files that `AutoTokenizer` reads.

    Args:
        pieces: the vocabulary.
        folder: the model's folder.
        longest: maximum number of word pieces in an input.
    """
    marks = {"pad": PADDING, "unk": UNKNOWN, "cls": CLS, "sep": SEP, "mask": _MASK}
    settings: dict[str, Any] = {f"{name}_token": mark for name, mark in marks.items()}
    settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": pieces.lowercase, "model_max_length": longest}
    (folder / VOCABULARY).write_bytes(pieces.as_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _main(model: Any) -> Any:
    assert isinstance(model, Electra | MaskedModel)
    return model.discriminator if isinstance(model, Electra) else model.network

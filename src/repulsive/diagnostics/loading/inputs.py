"""Make batches for a model: tokenised sentences, or example inputs by import path."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.loading.import_path import LoadError, import_object
from repulsive.diagnostics.loading.model import LoadedModel
from repulsive.errors import DataError, short_message

BATCH_SIZE = 8  # sentences per batch: large enough to use a CPU well, small enough to need little memory


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Batches for a model, and the tokens of each sentence in the order of the batches.

    Args:
        batches: keyword arguments of the model.
        tokens: tokens of each sentence, without padding.
        decoder_reads_source: whether the decoder of an encoder-decoder reads the same sentences as its encoder.
        limit: largest number of tokens of a sentence.
        longer: number of sentences that had more tokens and are cut.
    """

    batches: list[dict[str, Any]]
    tokens: list[list[str]]
    decoder_reads_source: bool = False
    limit: int = 0
    longer: int = 0

    @property
    def cut(self) -> str:
        """How many sentences are cut, and where; "" if none is."""
        return f"{self.longer} of {len(self.tokens)} sentences, after {self.limit} tokens" if self.longer else ""


def read_sentences(path: Path | None, sentences: Sequence[str], limit: int) -> list[str]:
    """Collect the given sentences and the sentences of a file (one per line); skip blank lines.

    Args:
        path: UTF-8 text file, with or without a byte order mark; None: no file.
        sentences: further sentences, which come first.
        limit: maximum number of sentences.

    Raises:
        DataError: the file cannot be read, or there are no sentences.
    """
    lines = list(sentences)
    if path is not None:
        try:
            lines += path.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise DataError(f"cannot read {str(path)!r}: it is not UTF-8 text; save it as UTF-8") from None
        except OSError as error:
            raise DataError(
                f"cannot read {str(path)!r} ({error.strerror}); give a file with one sentence per line"
            ) from None
    result = [line.strip() for line in lines if line.strip()]
    if not result and (path is not None or sentences):
        raise DataError(
            f"no sentence in {str(path)!r}; write one per line" if path else "--sentence: the text is empty"
        )
    return result[:limit]


def tokenize(loaded: LoadedModel, sentences: Sequence[str], max_length: int) -> TokenizedText:
    """Tokenise sentences into batches, shortest first, truncated to `max_length` tokens.

    Raises:
        DataError: there is no tokenizer, or it does not belong to the model.
    """
    tokenizer, model = loaded.tokenizer, loaded.model
    if tokenizer is None:
        raise DataError(
            "text needs a model folder with a tokenizer (tokenizer.json); `repulsive inspect` "
            "accepts other models with --example"
        )
    limits = [max_length, _max_positions(model), tokenizer.model_max_length]
    limit = min(size for size in limits if isinstance(size, int) and size > 0)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    batch_size = BATCH_SIZE if tokenizer.pad_token is not None else 1
    ordered = sorted(sentences, key=lambda text: (len(text), text))
    parameters = inspect.signature(model.forward).parameters
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    batches, tokens, longer = [], [], 0
    for start in range(0, len(ordered), batch_size):
        part = ordered[start : start + batch_size]
        encoded = tokenizer(part, return_tensors="pt", padding=batch_size > 1, truncation=True, max_length=limit)
        batch = {name: value for name, value in encoded.items() if name in parameters}
        if "input_ids" not in batch:
            expected = model.main_input_name if isinstance(model.main_input_name, str) else "other inputs"
            raise DataError(f"{type(model).__name__} reads {expected}, not text; give it inputs with --example")
        _check_token_ids(model, batch["input_ids"])
        longer += sum(bool(each.overflowing) for each in encoded.encodings or [])  # slow tokenizers have no encodings
        mask = encoded.get("attention_mask", torch.ones_like(batch["input_ids"]))
        tokens += [
            tokenizer.convert_ids_to_tokens(ids[real.bool()].tolist())
            for ids, real in zip(batch["input_ids"], mask, strict=True)
        ]
        if is_encoder_decoder:
            batch["decoder_input_ids"] = batch["input_ids"]
            if "decoder_attention_mask" in parameters and "attention_mask" in batch:
                batch["decoder_attention_mask"] = batch["attention_mask"]
        batches.append(batch)
    return TokenizedText(batches, tokens, is_encoder_decoder, limit, longer)


def example_inputs(path: str, model: nn.Module) -> Any:
    """Import example inputs: a tensor, tuple or mapping, or a function that returns them.

    Args:
        path: import path, `package.module:name`.
        model: the model; it is called with the inputs once.

    Raises:
        LoadError: the inputs cannot be imported, or the model does not run on them.
    """
    value = import_object(path)
    try:
        inputs = value() if callable(value) else value
        with torch.no_grad(), evaluating(model):
            call(model, inputs)
    except Exception as error:
        raise LoadError(f"the model does not run on the example inputs {path}: {short_message(error)}") from error
    return inputs


def _max_positions(model: nn.Module) -> int | None:
    """Return the number of positions a model supports: less than configured if they start after the padding index."""
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    padding = [table.padding_idx for table in tables if isinstance(table, nn.Embedding)]
    configured = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(configured, int):
        return None
    return configured - max([-1, *(index for index in padding if index is not None)]) - 1


def _check_token_ids(model: nn.Module, ids: torch.Tensor) -> None:
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if not ids.numel():
        raise DataError("the tokenizer returns no tokens for some of the sentences; remove these")
    if int(ids.max()) >= vocabulary:
        raise DataError(
            f"the tokenizer returns token id {int(ids.max())}, but the model's vocabulary has {vocabulary} tokens; "
            "use the model's own tokenizer"
        )

"""Measurements on the heads of a trained translator: similarity, ablation and attention maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.hooks.measure_batches import measure_batches
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.redundancy import Evaluate, head_ablation, pruning_curve
from repulsive.diagnostics.similarity import of_weights
from repulsive.heads import find_heads
from repulsive.lab.engine.reporting import Measured, Progress
from repulsive.lab.systems.translation import metrics
from repulsive.lab.systems.translation.batches import TokenBuckets
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.pair_tensors import padded_pairs
from repulsive.lab.systems.translation.translate import Search, translate
from repulsive.lab.text.pieces import EOS, Pieces
from repulsive.lab.text.prepared import Part
from repulsive.lab.text.tokens import PAD, Ragged
from repulsive.pages import Layered, Maps

COMPARED = 64  # sentences on which the activations of heads are compared
_BATCH_TOKENS = 4096  # padding included
Pair = tuple[Tensor, Tensor]  # source tokens, and target tokens shifted right


def measure_translator(
    model: nn.Module, part: Part, *, most: int, bleu: Evaluate | None = None, progress: Progress | None = None
) -> Measured:
    """Measure the heads of a translator; ablating a head costs a pass over the sentences.

    Args:
        model: a translator in evaluation mode.
        part: sentence pairs, on the model's device.
        most: maximum number of sentences, from the first on, to ablate heads on.
        bleu: what `bleu_of` returned for as many sentences; None: measure token accuracy, as `accuracy_of` does.
        progress: called after each head.
    """
    groups, layers = find_heads(model), find_attention_layers(model)
    count = min(most, len(part))
    batches = ((source, before) for _, source, before, _ in _batches(part, min(COMPARED, len(part))))
    running = measure_batches(model, batches, layers, real=_real)
    evaluate = accuracy_of(part, count) if bleu is None else bleu
    ablation = head_ablation(model, evaluate, layers=layers, progress=progress)
    return Measured(
        of_weights(groups),
        change=ablation.change[~ablation.change.isnan()],
        items=count,
        running=running.diversity,
        names=short_names(groups),
        by_layer=ablation.change,
        layers=ablation.layers,
        metric="accuracy" if bleu is None else "BLEU",
        pruned=pruning_curve(model, evaluate, -ablation.change, layers=layers),
    )


def accuracy_of(part: Part, count: int) -> Evaluate:
    """Return a function that counts correct tokens / mean number of tokens per sentence; the mean is token accuracy."""

    def evaluate(model: nn.Module) -> Tensor:
        correct, tokens = torch.zeros(count, dtype=torch.float64), 0
        for indices, source, before, after in _batches(part, count):
            right = (model(source, before).argmax(-1) == after) & (after != PAD)  # [B, T]
            correct[indices.cpu()] = right.double().sum(1).cpu()
            tokens += int((after != PAD).sum())
        return correct * count / tokens

    return evaluate


def bleu_of(source: Ragged, references: Sequence[str], pieces: Pieces, search: Search) -> Evaluate:
    """Return a function that computes BLEU of greedy translations of the first sentences, as a fraction.

    Args:
        source: sentences, on the model's device.
        references: reference translations, in words, of the first sentences; only these sentences are translated.
        pieces: the tokenizer.
        search: search settings; the beam is ignored.
    """
    count, greedy = len(references), replace(search, beam=1)
    first = Ragged(source.values[: int(source.offsets[count])], source.offsets[: count + 1])

    def evaluate(model: nn.Module) -> float:
        assert isinstance(model, Transformer)
        words = [pieces.words(best[0].tokens) for best in translate(model, first, greedy)]
        return metrics.paper_bleu(words, references).value / 100

    return evaluate


def layered_examples(
    part: Part, words: Sequence[str], indices: Tensor, models: Mapping[str, nn.Module]
) -> list[Layered]:
    """Collect the attention maps of every layer on some sentences, with the reference translation as the target.

    Args:
        part: sentence pairs, on the CPU.
        words: the vocabulary.
        indices: indices of the sentences, int64 [K].
        models: method -> translator on the CPU, in evaluation mode.
    """
    examples = []
    for index in indices.tolist():
        source, before, _ = padded_pairs(part, torch.tensor([index]), None)
        texts = {name: [words[i] for i in ids[0].tolist()] for name, ids in (("source", source), ("target", before))}
        examples.append(Layered(texts, {method: _maps(model, source, before) for method, model in models.items()}))
    return examples


def _maps(model: nn.Module, source: Tensor, before: Tensor) -> list[Maps]:
    names, layers = short_names(find_heads(model)), []
    for captured in capture(model, (source, before)).layers:
        where = captured.layer.where
        rows, columns = ("source" if side else "target" for side in (where == "encoder", where != "decoder"))
        layers.append(Maps(names[captured.name], captured.weights[0][0].float(), rows, columns))
    return layers


def _batches(part: Part, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield indices, source, shifted target and target of the first sentences, in batches from short to long."""
    source, target = (side.lengths[:count].cpu() for side in part.sentences)
    for batch in TokenBuckets(source, target, _BATCH_TOKENS).in_order():
        indices = batch.indices.to(part.labels.device)
        yield indices, *padded_pairs(part, indices, batch.length)


def _real(batch: Pair, where: str) -> Tensor:
    """Make a mask of the tokens to measure, without padding and without tokens after the end of a target."""
    source, before = batch
    return source != PAD if where == "encoder" else (before != PAD) & (before != EOS)

"""What a report measures on a translator: how alike its heads are at work, what each is worth, what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.hooks.measure_batches import measure_batches
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.redundancy import Evaluate, head_ablation, pruning_curve
from repulsive.diagnostics.similarity import of_weights
from repulsive.heads import find_heads
from repulsive.lab.systems.classification.measure import Measured
from repulsive.lab.systems.translation import metrics
from repulsive.lab.systems.translation.batches import TokenBuckets
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.lab.systems.translation.translate import translate
from repulsive.lab.text.pieces import BOS, EOS
from repulsive.lab.text.prepared import Part
from repulsive.lab.text.tokens import PAD, Ragged
from repulsive.pages import Layered, Maps

ALIKE = 64  # sentences on which heads are compared at work
_AT_ONCE = 4096  # pieces, padding included
Pair = tuple[Tensor, Tensor]  # source, and target so far


def measure_translator(
    model: nn.Module,
    task: TranslationTask,
    part: str,
    *,
    most: int,
    bleu: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> Measured:
    """Heads of a translator; each is taken away once, which costs a pass over the sentences.

    Args:
        model: in evaluation mode.
        task: the run's, on the model's device.
        part: "test", "dev" or a further test set.
        most: take heads away on the first so many sentences.
        bleu: of greedy translations; False: the share of pieces that are foreseen rightly, those before them given.
        tell: told how many heads were taken away, and of how many.
    """
    groups, attention_layers = find_heads(model), find_attention_layers(model)
    chosen = task.parts[part]
    count = min(most, len(chosen))
    batches = ((source, before) for _, source, before, _ in _batches(chosen, min(ALIKE, len(chosen))))
    seen = measure_batches(model, batches, attention_layers, real=_real)
    evaluate = bleu_of(task, part, count) if bleu else accuracy_of(chosen, count)
    found = head_ablation(model, evaluate, layers=attention_layers, progress=tell)
    return Measured(
        of_weights(groups),
        change=found.change[~found.change.isnan()],
        items=count,
        running=seen.diversity,
        names=short_names(groups),
        by_layer=found.change,
        layers=found.layers,
        metric="BLEU" if bleu else "accuracy",
        pruned=pruning_curve(model, evaluate, -found.change, layers=attention_layers),
    )


def accuracy_of(part: Part, count: int) -> Evaluate:
    """Right pieces of each of the first sentences over the mean number of pieces: its mean is a mean over pieces."""

    def evaluate(model: nn.Module) -> Tensor:
        found, pieces = torch.zeros(count, dtype=torch.float64), 0
        for indices, source, before, after in _batches(part, count):
            right = (model(source, before).argmax(-1) == after) & (after != PAD)  # [B, T]
            found[indices.cpu()] = right.double().sum(1).cpu()
            pieces += int((after != PAD).sum())
        return found * count / pieces

    return evaluate


def bleu_of(task: TranslationTask, part: str, count: int) -> Evaluate:
    """BLEU of greedy translations of the first sentences, as a share: 1 is 100."""
    source, search = task.parts[part].sentences[0], replace(task.recipe.search, beam=1)
    first = Ragged(source.values[: int(source.offsets[count])], source.offsets[: count + 1])
    known = task.references[part]["words"][:count]

    def evaluate(model: nn.Module) -> float:
        assert isinstance(model, Transformer)
        words = [task.pieces.words(best[0].tokens) for best in translate(model, first, search)]
        return metrics.paper_bleu(words, known).value / 100

    return evaluate


def layered_examples(task: TranslationTask, part: str, models: Mapping[str, nn.Module], count: int) -> list[Layered]:
    """Sentences of middling length and what every layer of each model looks at, the right translation given.

    Args:
        task: that of all models.
        part: of the data.
        models: method -> translator on the CPU, in evaluation mode.
        count: of the sentences.
    """
    chosen, words = task.data.parts[part], task.data.vocabulary.words
    lengths = chosen.lengths.float()
    near = (lengths - lengths.median()).abs().argsort(stable=True)[:count]  # [count]
    found = []
    for index in near.tolist():
        source, before, _ = _tables(chosen, torch.tensor([index]), None)
        texts = {name: [words[i] for i in ids[0].tolist()] for name, ids in (("source", source), ("target", before))}
        readings = {method: _read(model, source, before) for method, model in models.items()}
        found.append(Layered(texts, readings))
    return found


def _read(model: nn.Module, source: Tensor, before: Tensor) -> list[Maps]:
    names, layers = short_names(find_heads(model)), []
    for captured in capture(model, (source, before)).layers:
        where = captured.layer.where
        rows, columns = ("source" if side else "target" for side in (where == "encoder", where != "decoder"))
        layers.append(Maps(names[captured.name], captured.weights[0][0].float(), rows, columns))
    return layers


def _batches(part: Part, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Indices, source, target so far and target of the first sentences, from short to long."""
    source, target = (side.lengths[:count].cpu() for side in part.sentences)
    for batch in TokenBuckets(source, target, _AT_ONCE).in_order():
        indices = batch.indices.to(part.labels.device)
        yield indices, *_tables(part, indices, batch.length)


def _tables(part: Part, indices: Tensor, length: int | None) -> tuple[Tensor, Tensor, Tensor]:
    source, target = (side.padded(indices, length)[0].long() for side in part.sentences)
    return source, F.pad(target[:, :-1], (1, 0), value=BOS), target


def _real(batch: Pair, where: str) -> Tensor:
    """Tokens that count: what stands behind the end of a target is padding, whatever it is."""
    source, before = batch
    return source != PAD if where == "encoder" else (before != PAD) & (before != EOS)

"""Measure portable pruning of a trained causal language model, against random and least similar heads.

    python -m studies.pruning.run --model FOLDER --text FILE --keep 75% 50% --recover 16 --out results/pruning

The first sentences of the text score heads and train the pruned model, the next ones are held out: every perplexity
is measured on them. Controls keep as many query and key-value heads as the scores do: random heads, and the heads
whose attention logits are least similar to those of the other heads of their layer. The whole model is trained for as
many steps as the pruned ones, since training also adapts a model to the text.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from studies.arguments import errors_in_one_line
from studies.output import save
from studies.pruning.tables import draw, markdown, settings
from torch import Tensor, nn

from repulsive.diagnostics.causal_models import perplexity, train_causal
from repulsive.diagnostics.head_ranking import rank_heads
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.loading.inputs import read_sentences, tokenize
from repulsive.diagnostics.loading.model import load_model
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.portable_pruning import Selection, prove_equal, prune_portably, select_heads
from repulsive.diagnostics.pruning_measurements import cache_bytes
from repulsive.errors import ConfigError, DataError

Batches = Sequence[dict[str, Any]]


def parse(words: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal language model with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file, one sentence per line")
    parser.add_argument("--keep", nargs="+", default=["90%", "75%", "67%", "50%"], help="shares of the heads to keep")
    parser.add_argument("--recover", type=int, default=16, help="training steps after pruning")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="learning rate of --recover")
    parser.add_argument("--score", type=int, default=32, help="sentences that score heads and train")
    parser.add_argument("--test", type=int, default=64, help="held-out sentences, the next ones of the text")
    parser.add_argument("--length", type=int, default=48, help="truncate sentences to this many tokens")
    parser.add_argument("--border", type=int, default=2, help="heads on each side of the cut to ablate one by one")
    parser.add_argument("--seeds", type=int, default=3, help="random selections")
    parser.add_argument("--rounds", type=int, default=9, help="timed forward passes of each model")
    parser.add_argument("--name", help="name of the model in the results; the folder's by default")
    parser.add_argument("--out", type=Path, default=Path("results/pruning"), help="folder of the results")
    parser.add_argument("--save", type=Path, help="folder in which to save the pruned models, one for each size")
    return parser, parser.parse_args(words)


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the study and return its results as plain values."""
    loaded = load_model(arguments.model)
    sentences = read_sentences(arguments.text, [], arguments.score + arguments.test)
    if len(sentences) < arguments.score + arguments.test:
        raise DataError(
            f"{str(arguments.text)!r} has {len(sentences)} sentences; {arguments.score + arguments.test} are needed"
        )
    score = tokenize(loaded, sentences[: arguments.score], arguments.length).batches
    test = tokenize(loaded, sentences[arguments.score :], arguments.length).batches
    model = loaded.model.eval()
    heads = Heads(model, score[0])
    log = Log()
    models: dict[str, nn.Module] = {"whole": model}
    whole: dict[str, Any] = {"perplexity": perplexity(model, test), **size(model, heads)}
    log(f"whole: perplexity {whole['perplexity']:.2f}")
    similar = similarity_scores(heads, score)
    log("similarity measured")
    sizes: list[dict[str, Any]] = []
    for kept, selection in selections(heads, score, arguments):
        row = measure_size(heads, selection, similar, (score, test), models, arguments, log)
        sizes.append({"keep": kept, **row})
        log(str(sizes[-1]))
    if arguments.recover:
        trained = copy.deepcopy(model)
        train_causal(trained, score, arguments.recover, arguments.learning_rate)
        whole["recovered"] = perplexity(trained, test)
        log(f"whole, trained: perplexity {whole['recovered']:.2f}")
    times = time_in_turns(models, test[len(test) // 2], arguments.rounds)
    return {
        **settings(arguments, loaded, (score, test)),
        "whole": {**whole, **times["whole"]},
        "sizes": [{**row, **times[str(row["heads"])]} for row in sizes],
    }


def selections(heads: Heads, batches: Batches, arguments: argparse.Namespace) -> list[tuple[list[str], Selection]]:
    """The selection of every number of heads, with the shares that lead to it."""
    result: dict[int, tuple[list[str], Selection]] = {}
    ranks = rank_heads(heads, batches, 0.5, border=0)  # without exact ablation they are the same for every share
    for word in arguments.keep:
        share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        selection = select_heads(heads, ranks, share)
        number = selection.heads[1]
        if number not in result:
            if arguments.border:
                scores = rank_heads(heads, batches, number / selection.heads[0], border=arguments.border)
                selection = select_heads(heads, scores, share)
            result[number] = ([], selection)
        result[number][0].append(word)
    return list(result.values())


def measure_size(
    heads: Heads,
    selection: Selection,
    similar: Tensor,
    texts: tuple[Batches, Batches],
    models: dict[str, nn.Module],
    arguments: argparse.Namespace,
    log: Log,
) -> dict[str, Any]:
    """Measure one number of heads: scored heads ablated, pruned and recovered, and the controls ablated."""
    score, test = texts
    number, kv_heads = selection.heads[1], selection.kv_heads[1]
    share = number / selection.heads[0]
    smaller = prune_portably(heads, selection, score[0])
    models[str(number)] = smaller
    row: dict[str, Any] = {"heads": number, "kv_heads": kv_heads, **size(smaller, heads)}
    row["difference from ablated"] = prove_equal(heads, selection, smaller, test[0])
    row["ablated"] = ablated_perplexity(heads, selection, test)
    row["pruned"] = perplexity(smaller, test)
    log(f"{number} heads: perplexity {row['pruned']:.2f}")
    row["least similar"] = ablated_perplexity(heads, select_heads(heads, similar, share, kv_heads), test)
    row["random"] = []
    for seed in range(arguments.seeds):
        scores = torch.rand(similar.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        row["random"].append(ablated_perplexity(heads, select_heads(heads, scores, share, kv_heads), test))
    log(f"{number} heads: least similar {row['least similar']:.2f}, random {row['random']}")
    if arguments.save is not None:
        smaller.save_pretrained(arguments.save / str(number))  # type: ignore[operator]
    if arguments.recover:
        trained = copy.deepcopy(smaller)
        train_causal(trained, score, arguments.recover, arguments.learning_rate)
        row["recovered"] = perplexity(trained, test)
        log(f"{number} heads: recovered {row['recovered']:.2f}")
    return row


def similarity_scores(heads: Heads, batches: Batches) -> Tensor:
    """Minus the mean similarity of each head's attention logits with those of its layer's other heads [L, M]."""
    rows = {layer.name: layer.cosine for layer in heads.similarity(batches, "logits", twins=0)}
    missing = [layer.name for layer in heads.layers if layer.name not in rows]
    if missing:
        raise DataError(f"attention logits of {missing[0]} could not be compared")
    return torch.stack([-(rows[layer.name].sum(-1) - 1) / (layer.num_heads - 1) for layer in heads.layers])


def ablated_perplexity(heads: Heads, selection: Selection, batches: Batches) -> float:
    with torch.no_grad(), evaluating(heads.model), heads.ablated(selection.removed):
        return perplexity(heads.model, batches)


def size(model: nn.Module, heads: Heads) -> dict[str, int]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "cache_bytes": cache_bytes(model, heads)}


def time_in_turns(models: dict[str, nn.Module], batch: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Time forward passes of all models in turns, so that other work on the machine slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            start = time.perf_counter()
            with torch.no_grad(), evaluating(model):
                call(model, batch)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"milliseconds": sorted(values[1:])} for name, values in times.items()}  # the first is a warm-up


class Log:
    """Print messages with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, message: str) -> None:
        print(f"{time.monotonic() - self._start:6.0f} s  {message}", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser, arguments = parse(words)
    with errors_in_one_line(parser):
        if arguments.rounds < 1 or arguments.score < 1 or arguments.test < 1:
            raise ConfigError("--rounds, --score and --test: expected at least 1")
        result = study(arguments)
        name = result["model"]
        save(arguments.out / f"{name}.json", result)
        draw(result, arguments.out / f"{name}.svg")
        save(arguments.out / f"{name}.md", markdown(result))
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()

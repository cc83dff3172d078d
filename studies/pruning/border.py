"""Compare gradient scores with exact ablation at the cut (`repulsive prune --border`) by perplexity on held-out text.

    python -m studies.pruning.border --model FOLDER --text FILE --texts 3 --score 12 --test 100 --out results/pruning

The first sentences of the text are divided into several scoring texts, the next ones are held out. For each scoring
text all heads are scored by gradient and ablated one at a time. The ranks for every border follow from these numbers,
as in `repulsive prune`. A border of 0 is the gradient score alone; "all" ranks every head by exact ablation.
Results are written after each scoring text.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from studies.arguments import errors_in_one_line
from studies.output import save
from studies.pruning.tables import count_tokens, environment, origin
from torch import Tensor, nn

from repulsive.diagnostics.head_ranking import merge_ranks
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.loading.inputs import read_sentences, tokenize
from repulsive.diagnostics.loading.model import load_model
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.output_change import label_free_loss
from repulsive.diagnostics.portable_pruning import Selection, prune_portably, select_heads
from repulsive.errors import ConfigError, DataError
from repulsive.safety.markdown import format_table

Batches = Sequence[dict[str, Any]]
RESAMPLES = 10_000


def parse(words: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal language model with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file, one sentence per line")
    parser.add_argument("--keep", nargs="+", default=["67%", "50%"], help="shares of the heads to keep")
    parser.add_argument("--borders", nargs="+", default=["0", "2", "all"], help="borders to compare; the first is 0")
    parser.add_argument("--texts", type=int, default=3, help="number of scoring texts")
    parser.add_argument("--score", type=int, default=12, help="sentences of each scoring text")
    parser.add_argument("--test", type=int, default=100, help="held-out sentences")
    parser.add_argument("--length", type=int, default=40, help="truncate sentences to this many tokens")
    parser.add_argument("--name", help="name of the model in the results; the folder's by default")
    parser.add_argument("--text-name", help="description of the text in the results; the file's name by default")
    parser.add_argument("--out", type=Path, default=Path("results/pruning"), help="folder of the results")
    return parser, parser.parse_args(words)


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the study, write its results after each scoring text, and return them as plain values."""
    start = time.monotonic()
    loaded = load_model(arguments.model)
    needed = arguments.texts * arguments.score + arguments.test
    sentences = read_sentences(arguments.text, [], needed)
    if len(sentences) < needed:
        raise DataError(f"{str(arguments.text)!r} has {len(sentences)} sentences; {needed} are needed")
    test = tokenize(loaded, sentences[-arguments.test :], arguments.length).batches
    model = loaded.model.eval()
    words = ["--model", "FOLDER", "--text", "FILE"]
    for name in ("keep", "borders", "texts", "score", "test", "length"):
        value = getattr(arguments, name)
        words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    whole, tokens = sentence_losses(model, test)
    result: dict[str, Any] = {
        "model": arguments.name or Path(arguments.model).name,
        "text": arguments.text_name or arguments.text.name,
        "held_out_text": {"sentences": arguments.test, "tokens": sum(map(count_tokens, test))},
        "predicted_tokens": tokens.tolist(),
        "whole": perplexity_of(whole, tokens),
        "command": shlex.join(["python", "-m", "studies.pruning.border", *words]),
        **environment(),
        "texts": [],
    }
    print(f"whole: perplexity {result['whole']:.2f}", flush=True)
    for number in range(arguments.texts):
        part = sentences[number * arguments.score : (number + 1) * arguments.score]
        score = tokenize(loaded, part, arguments.length).batches
        row = measure_text(Heads(model, score[0]), score, test, arguments)
        result["texts"].append(row)
        result["seconds"] = round(time.monotonic() - start)
        print(f"{result['seconds']} s, scoring text {number + 1}: {summary(row)}", flush=True)
        write(result, arguments.out)
    return result


def measure_text(heads: Heads, score: Batches, test: Batches, arguments: argparse.Namespace) -> dict[str, Any]:
    """Score the heads on one text, and measure the model pruned with each border on the held-out text."""
    loss = label_free_loss(torch.Generator().manual_seed(0))
    gradient = first_order_importance(heads.model, loss, score, normalise=False, layers=heads.layers)
    start = time.monotonic()
    ablation = ablate_output(heads.model, score, layers=heads.layers)
    seconds = time.monotonic() - start
    exact = dict(zip(ablation.heads, ablation.items.mean(1).tolist(), strict=True))
    numbers = [layer.num_heads for layer in heads.layers]
    rows: list[dict[str, Any]] = []
    for word in arguments.keep:
        share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        kept = select_heads(heads, merge_ranks(gradient, numbers, share, 0, lambda at_cut: {}), share).heads[1]
        baseline: Selection | None = None
        for border in arguments.borders:
            # the cut lies at the number of heads that the config accepts, as in `studies.pruning.run`
            width = max(numbers) if border == "all" else int(border)
            ranks = merge_ranks(gradient, numbers, kept / numbers[0], width, lambda at_cut: exact)
            selection = select_heads(heads, ranks, share)
            baseline = selection if baseline is None else baseline
            losses, tokens = sentence_losses(prune_portably(heads, selection, score[0]), test)
            rows.append(
                {
                    "keep": word,
                    "heads": selection.heads[1],
                    "kv_heads": selection.kv_heads[1],
                    "border": border,
                    "other_heads": len(set(selection.removed) - set(baseline.removed)),
                    "removed_heads": len(selection.removed),
                    "perplexity": perplexity_of(losses, tokens),
                    "losses": [round(value, 4) for value in losses.tolist()],
                }
            )
    return {
        "sentences": arguments.score,
        "tokens": sum(map(count_tokens, score)),
        "ablation_seconds": round(seconds),
        "gradient": [[float(f"{value:.6g}") for value in row] for row in gradient.tolist()],
        "exact": [[float(f"{exact[row, head]:.6g}") for head in range(n)] for row, n in enumerate(numbers)],
        "rows": rows,
    }


@torch.no_grad()
def sentence_losses(model: nn.Module, batches: Batches) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each sentence and its number of predicted tokens, float64 [sentences] each."""
    losses, tokens = [], []
    with evaluating(model):
        for batch in batches:
            logits = call(model, batch).logits[:, :-1]  # [B, T - 1, V]
            ids = batch["input_ids"][:, 1:]
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:].double()
            loss = nn.functional.cross_entropy(logits.mT.float(), ids, reduction="none").double()  # [B, T - 1]
            losses.append((loss * real).sum(1))
            tokens.append(real.sum(1))
    return torch.cat(losses), torch.cat(tokens)


def perplexity_of(losses: Tensor, tokens: Tensor) -> float:
    return math.exp(float(losses.sum() / tokens.sum()))


def ratio(row: Sequence[Sequence[float]], base: Sequence[Sequence[float]], tokens: Sequence[float]) -> list[float]:
    """Ratio of two perplexities with its 95 % interval over held-out sentences (paired bootstrap).

    Args:
        row: losses of each held-out sentence, one list for each scoring text; their ratios are averaged (geometric).
        base: losses of the model to compare with.
        tokens: predicted tokens of each sentence.

    Returns:
        [ratio, lower end, upper end].
    """
    difference = (torch.tensor(row, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64)).mean(0)
    count = torch.tensor(tokens, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(count), (RESAMPLES, len(count)), generator=generator)
    means = difference[draws].sum(1) / count[draws].sum(1)
    ends = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [math.exp(value) for value in (float(difference.sum() / count.sum()), *ends)]


def summary(row: dict[str, Any]) -> str:
    return ", ".join(f"{r['heads']} heads, border {r['border']}: {r['perplexity']:.1f}" for r in row["rows"])


def markdown(result: dict[str, Any]) -> str:
    """The results as a page."""
    texts, test = result["texts"], result["held_out_text"]
    tokens = ", ".join(str(text["tokens"]) for text in texts)
    rows = []
    for place, first in enumerate(texts[0]["rows"]):
        same = [text["rows"][place] for text in texts]
        base = next(i for i, r in enumerate(texts[0]["rows"]) if r["keep"] == first["keep"])
        ratios = "-"
        if place != base:
            losses = [r["losses"] for r in same]
            value, low, high = ratio(losses, [t["rows"][base]["losses"] for t in texts], result["predicted_tokens"])
            ratios = f"{value:.2f} ({low:.2f} to {high:.2f})"
        others = ", ".join(f"{r['other_heads']} of {r['removed_heads']}" for r in same) if place != base else "-"
        perplexities = ", ".join(f"{r['perplexity']:.1f}" for r in same)
        rows.append([str(first["heads"]), first["border"], perplexities, ratios, others])
    head = ["heads", "`--border`", "perplexity, by scoring text", "ratio to border 0 (95 % interval)", "changed heads"]
    lines = [
        f"# Exact ablation at the cut: {result['model']}",
        "",
        f"Heads were scored on {len(texts)} different texts of {texts[0]['sentences']} sentences ({tokens} tokens) of "
        f"{result['text']}. Perplexity was measured on {test['sentences']} other sentences ({test['tokens']} tokens), "
        f"without recovery; that of the whole model is {result['whole']:.1f}. The ratio is the geometric mean over "
        "scoring texts; its interval is over held-out sentences (paired bootstrap), not over scoring texts. "
        '"Changed heads" are removed heads that border 0 keeps. Border "all" ranks every head by exact ablation.',
        "",
        format_table(head, rows),
        "",
        f"Ablating all heads took {', '.join(str(text['ablation_seconds']) for text in texts)} s, the study "
        f"{result['seconds']} s.",
        "",
        origin(result),
        "",
    ]
    return "\n".join(lines)


def write(result: dict[str, Any], out: Path) -> None:
    save(out / f"{result['model']}-border.json", result)
    save(out / f"{result['model']}-border.md", markdown(result))


def main(words: Sequence[str] | None = None) -> None:
    parser, arguments = parse(words)
    with errors_in_one_line(parser):
        if min(arguments.texts, arguments.score, arguments.test) < 1:
            raise ConfigError("--texts, --score and --test: expected at least 1")
        if arguments.borders[0] != "0" or not all(word == "all" or word.isdigit() for word in arguments.borders):
            raise ConfigError("--borders: expected 0 first, then numbers or 'all'")
        study(arguments)
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()

"""How fast translation trains and decodes, against transformers, in one run on one device.

    python -m studies.speed.translation --data prepared/multi30k --device cuda --out results/translation/speed

**train**: the recipes `multi30k/small-ma` and `multi30k/small-svgd` (all layers repulsive) in the project's own loop,
with its batches, optimiser and logging, but no looks at the development set and no checkpoints. The first epochs, which
compile and capture, do not count; then epochs of the two alternate, each timed from an idle device until it is idle
again. A rate is the epoch's target tokens, padding not counted, over the median epoch.

**marian**: transformers' MarianMT of the same sizes on the sentences of the same padded batches, under `Seq2SeqTrainer`
(autocast, fused AdamW, label smoothing, pinned memory; no logging, clipping, saving or checks of the loss) and in a
bare loop (batches on the device beforehand), eager and, if asked, compiled. Batches are made before the clock runs. A
rate is the real target tokens of all steps after the warm-up over their time; the device is awaited at the two ends.

**decode** and **generate**: beam search over sentences of one length (random pieces and an end) by the project's
`translate` and by transformers' `generate` with its cache, both in the recipe's precision. What a search costs depends
on when translations end, and untrained models end anywhere. So both are kept from ending, by a logit of the end that is
never chosen, and both stop after `--length` steps: the same work, so many steps of a full beam for every sentence. It
leaves out what the project gains where sentences end early, by dropping them from the batch, and says nothing about the
quality of translations. Each takes the batch size that was quickest on one batch, then translates all sentences.

Everything is printed and written to speed.json and speed.md as soon as it is known, and joins what an earlier call with
the same settings, machine and versions has left there. Each part stops at `--limit` seconds, where it can.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from studies.speed.bench import SpeedBench, trained
from studies.speed.table import as_markdown
from studies.speed.timed_loop import TimedLoop, epoch_of, open_task
from torch import Tensor

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.clock import compare, wall
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.lab.systems.translation.translate import translate
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.lab.text.tokens import Ragged

RECIPES = {"MA": "multi30k/small-ma", "SVGD": "multi30k/small-svgd"}
UNLIKELY = -30.0  # logit of an end that never comes
PARTS = ("train", "decode", "generate", "marian")
SETTINGS = ("data", "device", "set", "sentences", "length", "beam")  # what parts of one file have in common


class Bench(SpeedBench):
    """Parts of translation."""

    parts = PARTS
    settings = SETTINGS

    def as_markdown(self) -> str:
        return as_markdown(self.facts)

    def task(self, tokens: int, recipe: str = RECIPES["MA"]) -> TranslationTask:
        return open_task(recipe, self.given.data.resolve(), [f"training.batch={tokens}", *self.given.set])

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        for tokens in self.given.tokens:
            tasks = {label: self.task(tokens, name) for label, name in RECIPES.items()}
            loops = {label: TimedLoop(task, self.given.device) for label, task in tasks.items()}
            for label, loop in loops.items():
                for _ in range(self.given.warm_up):
                    self.check(f"warming up {label}, {tokens} tokens")
                    taken = wall(loop.one_epoch, self.device)
                    print(f"train: {tokens} tokens, {label}: an epoch of warm-up in {taken:.2f} s", flush=True)
            seconds = self.alternate({label: loop.one_epoch for label, loop in loops.items()})
            for label, loop in loops.items():
                held, operations = epoch_of(tasks[label])
                rates = self.rates(held, statistics.median(seconds[label]), loop.steps, operations)
                numbers = {"steps": loop.steps, "parameters": trained(loop.bare), "epoch_seconds": seconds[label]}
                self.note("train", f"{tokens} {label}", rates | numbers)
            found = asdict(compare(list(zip(seconds["SVGD"], seconds["MA"], strict=True)), draws=500))
            self.note("train", f"{tokens} ratio", {name: found[name] for name in ("ratio", "low", "high", "rounds")})
            del loops, loop, tasks
            self.clear()

    def marian(self) -> None:
        from studies.speed import marian

        ways: dict[str, Callable[..., marian.Stretch]] = {"Seq2SeqTrainer": marian.by_trainer, "bare loop": marian.bare}
        if self.given.compile_marian:
            ways["bare loop, compiled"] = lambda *rest: marian.bare(*rest, compiled=True)
        for tokens in self.given.tokens:
            task = self.task(tokens)
            held, operations = epoch_of(task)
            batches = marian.Batches(task, tokens, self.given.steps)
            for label, way in ways.items():
                self.check(f"{label}, {tokens} tokens")
                model = marian.twin(task.recipe, len(task.data.vocabulary))
                warm_up = min(20, self.given.steps // 2)
                timer = marian.Timer(batches.tokens, warm_up, self.given.measure, self.device)
                found = way(task.recipe, model, batches, timer)
                rates = self.rates(found.tokens, found.seconds, found.steps, operations * found.tokens / held)
                numbers = {"steps": found.steps, "parameters": trained(model)}
                self.note("marian", f"{tokens} {label}", rates | numbers)
                del model

    # -- decoding -----------------------------------------------------------------------------------------------

    def decode(self) -> None:
        task = self.task(self.given.tokens[0])
        torch.manual_seed(task.recipe.seed)
        model = never_ends(task.model().to(self.device))
        source = self._source(len(task.data.vocabulary))
        search = dataclasses.replace(
            task.recipe.search,
            beam=self.given.beam,
            lenpen=1.0,
            longest=self.given.length,
            precision=task.recipe.training.precision,
        )

        def run(some: Tensor, at_once: int) -> list[int]:
            offsets = torch.arange(len(some) + 1, device=self.device) * some.shape[1]
            ragged = Ragged(some.flatten().int(), offsets)
            best = translate(model, ragged, dataclasses.replace(search, at_once=at_once))
            return [len(hypotheses[0].tokens) + 1 for hypotheses in best]  # and the end

        per_sentence = -(-self.given.length // 4) * 4  # padded to a multiple of four
        self._decoding("decode", source, run, {size: size * per_sentence for size in self.given.batches})

    def generate(self) -> None:
        from studies.speed import marian

        task = self.task(self.given.tokens[0])
        precision = torch.bfloat16 if task.recipe.training.precision == "bf16" else torch.float32
        model = marian.twin(task.recipe, len(task.data.vocabulary)).to(self.device, precision)
        marian.never_ends(model, UNLIKELY)
        source = self._source(len(task.data.vocabulary))

        def run(some: Tensor, batch: int) -> list[int]:
            found = marian.generate(model, some, batch, self.given.beam, self.given.length)
            return ((found != EOS).sum(1) - 1).tolist()  # not the beginning

        self._decoding("generate", source, run, {size: size for size in self.given.batches})

    def _decoding(
        self, part: str, source: Tensor, run: Callable[[Tensor, int], list[int]], sizes: dict[int, int]
    ) -> None:
        """Find the quickest of some batch sizes, given as what `run` takes, then translate everything with it."""
        rates = {}
        lengths: list[int] = []
        few = min(sizes)
        run(source[:few], sizes[few])  # libraries set themselves up
        for size, setting in sizes.items():
            some = source[:size]
            self.check(f"batches of {size}")
            rates[size] = len(some) / wall(lambda some=some, setting=setting: run(some, setting), self.device)
            self.note(part, f"sentences per second in a batch of {size}", rates[size])
        best = max(rates, key=lambda size: rates[size])
        self.check("all sentences")
        taken = wall(lambda: lengths.extend(run(source, sizes[best])), self.device)
        if set(lengths) != {self.given.length}:
            raise RuntimeError(f"translations of {min(lengths)} to {max(lengths)} words, not {self.given.length}")
        found = {
            "seconds": taken,
            "batch": best,
            "sentences": len(source),
            "beam": self.given.beam,
            "words": statistics.mean(lengths),
            "sentences_per_second": len(source) / taken,
            "words_per_second": sum(lengths) / taken,
        }
        if self.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        self.note(part, "all", found)

    def _source(self, vocabulary: int) -> Tensor:
        """Random pieces and an end, [N, S]."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.given.sentences, self.given.length)
        table = torch.randint(len(MARKS), vocabulary, shape, generator=draw)
        table[:, -1] = EOS
        return table.to(self.device)


@torch.no_grad()
def never_ends(model: Transformer) -> Transformer:
    """Lower the logit of the end by a constant; the other words' change a little, each by one of its own."""
    norm: Any = model.decoder.norm if model.config.pre_norm else model.decoder.layers[-1].norms[-1]
    end = model.embedding.weight[EOS]
    norm.bias.add_(UNLIKELY * end / end.square().sum())
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder that `repulsive prepare translation` made")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/translation/speed"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for the recipes")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384, 4096], help="of a side of a batch")
    parser.add_argument("--limit", type=float, default=35.0, help="seconds for each part; compiling takes more")
    parser.add_argument("--measure", type=float, default=4.0, help="seconds that a rate of training is measured over")
    parser.add_argument("--warm-up", type=int, default=3, help="epochs that do not count; graphs are captured in them")
    parser.add_argument("--steps", type=int, default=300, help="of transformers' training, warm-up included")
    parser.add_argument("--compile-marian", action="store_true", help="also compile the bare loop; it takes a minute")
    parser.add_argument("--sentences", type=int, default=6750)
    parser.add_argument("--length", type=int, default=26, help="tokens of each sentence, and steps of each translation")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 1024, 3392], help="sentences decoded at a time")
    given = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        failed = Bench(given, shlex.join(["python", "-m", "studies.speed.translation", *words])).run()
    except RepulsiveError as error:
        raise SystemExit(f"studies.speed.translation: {error}") from None
    if failed:
        raise SystemExit(f"studies.speed.translation: {', '.join(failed)} failed, see above")


if __name__ == "__main__":
    main()

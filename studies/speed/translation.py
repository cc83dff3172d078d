"""Speed of translation compared with transformers, in training and decoding, on one device.

    python -m studies.speed.translation --data prepared/multi30k --device cuda --out results/translation/speed

Needs a folder made by `repulsive prepare translation`, and transformers. Writes speed.json and speed.md to `--out`.

**train**: the recipes `multi30k/small-ma` and `multi30k/small-svgd` (repulsion in all layers) in this package's
training loop, with its batches, optimizer and logging, but without evaluations and checkpoints. The first epochs, which
compile and capture CUDA graphs, are not counted; then epochs of the two recipes alternate. Each is timed until the
device is idle again. A rate is the epoch's target tokens, without padding, over the median time.

**marian**: transformers' MarianMT of the same size on the sentences of the same padded batches, with `Seq2SeqTrainer`
(autocast, fused AdamW, label smoothing, pinned memory; no logging, clipping, saving or checks of the loss) and in a
minimal loop (batches already on the device), eager and, if requested, compiled. Batches are made before the
measurement. A rate is the target tokens without padding of all steps after the warm-up over their time, synchronised
with the device at both ends.

**decode** and **generate**: beam search over sentences of equal length (random tokens and an end) with this package's
`translate` and with transformers' `generate` and its cache, both in the recipe's precision. The cost of a search
depends on when translations end, and untrained models end anywhere. So the logit of the end token is set so low that
both stop after `--length` steps: the same work, that many steps of a full beam for every sentence. This ignores the
time that this package saves by dropping finished sentences from the batch, and says nothing about the quality of
translations. Each uses the batch size that was fastest on one batch, then translates all sentences.

Every measurement is printed and saved at once, and added to those of earlier calls with the same settings, machine and
versions. Each part stops after `--limit` seconds if it can.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from studies.speed.speed_bench import SpeedBench, count_parameters
from studies.speed.tables import as_markdown
from studies.speed.timed_loop import TimedLoop, epoch_of, open_task
from torch import Tensor

from repulsive.lab.bench.clock import compare, wall_time
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.lab.systems.translation.translate import translate
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.lab.text.tokens import Ragged

RECIPES = {"MA": "multi30k/small-ma", "SVGD": "multi30k/small-svgd"}
UNLIKELY = -30.0  # logit of an end token that is never chosen
PARTS = ("train", "decode", "generate", "marian")
SETTINGS = ("data", "device", "set", "sentences", "length", "beam")  # options that all parts of one file share


class Bench(SpeedBench):
    """The benchmark of translation."""

    parts = PARTS
    settings = SETTINGS

    def as_markdown(self) -> str:
        return as_markdown(self.facts)

    def task(self, tokens: int, recipe: str = RECIPES["MA"]) -> TranslationTask:
        return open_task(recipe, self.arguments.data.resolve(), [f"training.batch={tokens}", *self.arguments.set])

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        for tokens in self.arguments.tokens:
            tasks = {label: self.task(tokens, name) for label, name in RECIPES.items()}
            loops = {label: TimedLoop(task, self.arguments.device) for label, task in tasks.items()}
            for label, loop in loops.items():
                for _ in range(self.arguments.warm_up):
                    self.check_time(f"warming up {label}, {tokens} tokens")
                    taken = wall_time(loop.one_epoch, self.device)
                    print(f"train: {tokens} tokens, {label}: an epoch of warm-up in {taken:.2f} s", flush=True)
            seconds = self.alternate({label: loop.one_epoch for label, loop in loops.items()})
            for label, loop in loops.items():
                held, operations = epoch_of(tasks[label])
                rates = self.rates(held, statistics.median(seconds[label]), loop.steps, operations)
                numbers = {
                    "steps": loop.steps,
                    "parameters": count_parameters(loop.bare),
                    "epoch_seconds": seconds[label],
                }
                self.record("train", f"{tokens} {label}", rates | numbers)
            ratio = asdict(compare(list(zip(seconds["SVGD"], seconds["MA"], strict=True)), draws=500))
            self.record("train", f"{tokens} ratio", {name: ratio[name] for name in ("ratio", "low", "high", "rounds")})
            del loops, loop, tasks
            self.clear()

    def marian(self) -> None:
        from studies.speed import marian_trainer  # needs transformers

        ways: dict[str, Callable[..., marian_trainer.Stretch]] = {
            "Seq2SeqTrainer": marian_trainer.train_with_trainer,
            "bare loop": marian_trainer.train_bare,
        }
        if self.arguments.compile_marian:
            ways["bare loop, compiled"] = lambda *rest: marian_trainer.train_bare(*rest, compiled=True)
        for tokens in self.arguments.tokens:
            task = self.task(tokens)
            held, operations = epoch_of(task)
            batches = marian_trainer.Batches(task, tokens, self.arguments.steps)
            for label, way in ways.items():
                self.check_time(f"{label}, {tokens} tokens")
                model = marian_trainer.make_marian(task.recipe, len(task.data.vocabulary))
                warm_up = min(20, self.arguments.steps // 2)
                timer = marian_trainer.Timer(batches.tokens, warm_up, self.arguments.measure, self.device)
                stretch = way(task.recipe, model, batches, timer)
                needed = operations * stretch.tokens / held
                rates = self.rates(stretch.tokens, stretch.seconds, stretch.steps, needed)
                numbers = {"steps": stretch.steps, "parameters": count_parameters(model)}
                self.record("marian", f"{tokens} {label}", rates | numbers)
                del model

    # -- decoding -----------------------------------------------------------------------------------------------

    def decode(self) -> None:
        task = self.task(self.arguments.tokens[0])
        torch.manual_seed(task.recipe.seed)
        model = never_ends(task.model().to(self.device))
        source = self._source(len(task.data.vocabulary))
        search = dataclasses.replace(
            task.recipe.search,
            beam=self.arguments.beam,
            lenpen=1.0,
            longest=self.arguments.length,
            precision=task.recipe.training.precision,
        )

        def run(some: Tensor, at_once: int) -> list[int]:
            offsets = torch.arange(len(some) + 1, device=self.device) * some.shape[1]
            ragged = Ragged(some.flatten().int(), offsets)
            best = translate(model, ragged, dataclasses.replace(search, at_once=at_once))
            return [len(hypotheses[0].tokens) + 1 for hypotheses in best]  # with the end

        per_sentence = -(-self.arguments.length // 4) * 4  # padded to a multiple of four
        self._decoding("decode", source, run, {size: size * per_sentence for size in self.arguments.batches})

    def generate(self) -> None:
        from studies.speed import marian_trainer  # needs transformers

        task = self.task(self.arguments.tokens[0])
        precision = torch.bfloat16 if task.recipe.training.precision == "bf16" else torch.float32
        model = marian_trainer.make_marian(task.recipe, len(task.data.vocabulary)).to(self.device, precision)
        marian_trainer.never_ends(model, UNLIKELY)
        source = self._source(len(task.data.vocabulary))

        def run(some: Tensor, batch: int) -> list[int]:
            tokens = marian_trainer.generate(model, some, batch, self.arguments.beam, self.arguments.length)
            return ((tokens != EOS).sum(1) - 1).tolist()  # without the start token

        self._decoding("generate", source, run, {size: size for size in self.arguments.batches})

    def _decoding(
        self, part: str, source: Tensor, run: Callable[[Tensor, int], list[int]], sizes: dict[int, int]
    ) -> None:
        """Find the fastest batch size, then translate all sentences with it.

        Args:
            part: name of the part.
            source: all sentences.
            run: translates sentences with a batch setting, and returns the lengths.
            sizes: sentences per batch -> batch setting of `run`.
        """
        rates = {}
        lengths: list[int] = []
        few = min(sizes)
        run(source[:few], sizes[few])  # warm-up
        for size, setting in sizes.items():
            some = source[:size]
            self.check_time(f"batches of {size}")
            rates[size] = len(some) / wall_time(lambda some=some, setting=setting: run(some, setting), self.device)
            self.record(part, f"sentences per second in a batch of {size}", rates[size])
        best = max(rates, key=lambda size: rates[size])
        self.check_time("all sentences")
        taken = wall_time(lambda: lengths.extend(run(source, sizes[best])), self.device)
        if set(lengths) != {self.arguments.length}:
            raise RuntimeError(
                f"expected translations of {self.arguments.length} words, got {min(lengths)} to {max(lengths)}"
            )
        numbers = {
            "seconds": taken,
            "batch": best,
            "sentences": len(source),
            "beam": self.arguments.beam,
            "words": statistics.mean(lengths),
            "sentences_per_second": len(source) / taken,
            "words_per_second": sum(lengths) / taken,
        }
        if self.device.type == "cuda":
            numbers["peak_bytes"] = torch.cuda.max_memory_allocated()
        self.record(part, "all", numbers)

    def _source(self, vocabulary: int) -> Tensor:
        """Random tokens and an end, [N, S]."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.arguments.sentences, self.arguments.length)
        table = torch.randint(len(MARKS), vocabulary, shape, generator=draw)
        table[:, -1] = EOS
        return table.to(self.device)


@torch.no_grad()
def never_ends(model: Transformer) -> Transformer:
    """Lower the logit of the end token by a constant; those of other tokens change a little."""
    norm: Any = model.decoder.norm if model.config.pre_norm else model.decoder.layers[-1].norms[-1]
    end = model.embedding.weight[EOS]
    norm.bias.add_(UNLIKELY * end / end.square().sum())
    return model.eval()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder made by `repulsive prepare translation`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/translation/speed"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for the recipes")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384, 4096], help="tokens of one side of a batch")
    parser.add_argument("--limit", type=float, default=35.0, help="seconds for each part; compiling takes more")
    parser.add_argument("--measure", type=float, default=4.0, help="seconds of each measurement of training")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="epochs that are not counted; CUDA graphs are captured in them"
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="maximum steps of transformers' training, warm-up included"
    )
    parser.add_argument("--compile-marian", action="store_true", help="also compile the bare loop; takes a minute")
    parser.add_argument("--sentences", type=int, default=6750, help="sentences to decode")
    parser.add_argument("--length", type=int, default=26, help="tokens of each sentence, and steps of each translation")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[256, 1024, 3392], help="sentences per batch of decoding"
    )
    arguments = parser.parse_args(words)
    Bench.run_from_command_line("studies.speed.translation", arguments, words)


if __name__ == "__main__":
    main()

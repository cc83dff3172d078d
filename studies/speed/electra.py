"""How fast ELECTRA pre-trains, against transformers' `Trainer`, and what repulsion takes of it, on one device.

    python -m studies.speed.electra --data prepared/pretrain --device cuda --out results/electra/speed

**train**: the recipes `electra/small-ma` and `electra/small-svgd` (the discriminator's first layer repulsive) in the
project's own loop, with its batches, masks, optimiser, clipping and logging, but no looks at the development set and no
checkpoints; captured, and on a GPU compiled. The first stretches, in which that happens, do not count; then stretches
of the two alternate, each timed from an idle device until it is idle again. A rate is a stretch's tokens over the
median stretch. **Repulsion** is the ratio of the two within rounds, with a bootstrap interval; and what hooks of the
optimiser take inside steps. Plain training has such a hook too: it clips.

**trainer**: the same modules, batches, masks (by the same code, on the device) and precision under `Trainer`: autocast,
fused AdamW, the same clipping, processes that fetch batches into pinned memory; no logging, saving or checks of the
loss. Once with transformers' modules as they are, and on a GPU once with what the project's own loop trains: states
between blocks in half precision, layers compiled. A rate is the tokens of all steps after the warm-up over their time;
the device is awaited at the two ends.

Operations are 6 x the multiplications of a forward pass: see `operations`. The limit is the vendor's, for dense bf16.

Everything is printed and written to speed.json and speed.md as soon as it is known, and joins what an earlier call with
the same settings, machine and versions has left there. `--limit` is for all of it: what no longer fits is left out, and
named. Sizes that the device has no memory for are named too.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from studies.speed.bench import SpeedBench, trained
from studies.speed.table import line, origin, training
from studies.speed.timed_loop import TimedLoop

from repulsive.errors import ConfigError, RepulsiveError
from repulsive.lab.bench.clock import compare, wall
from repulsive.lab.bench.steps import time_inside
from repulsive.lab.systems.electra.masking import most_places
from repulsive.lab.systems.electra.task import Model, PretrainingTask
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.repulsion.attach import unwrap_optimizer

LABELS = {"MA": "ma", "SVGD": "svgd"}
PARTS = ("train", "trainer")
SYSTEMS = {"train": "repulsive", "trainer": "transformers"}
SETTINGS = ("data", "device", "set", "size", "stretch", "compile", "workers")
TITLES = ("sequences", "training", "tokens/s", "ms a step", "TFLOP a step", "TFLOP/s", "of the bf16 limit")
HEAD = ("sequences", "hooks of", "host, ms a step", "device, ms a step", "device, of the step")
COUNTED = "Operations are 6 x the multiplications of a forward pass, padding included, see `operations`.  "
FIRST = 0.65  # of the time, at most, is the project's own, where both are measured
FEWEST = 4  # steps of a stretch


class Bench(SpeedBench):
    """Parts of pre-training."""

    parts = PARTS
    settings = SETTINGS
    in_all = True

    def as_markdown(self) -> str:
        lines = ["# Speed of pre-training", "", *training(self.facts, SYSTEMS, TITLES, COUNTED), *self._hooks()]
        return "\n".join([*lines, *origin(self.facts, PARTS, "studies/speed/electra.py")]) + "\n"

    def task(self, label: str, size: int, *, compiled: bool) -> PretrainingTask:
        """A recipe on the data, a stretch of steps called an epoch."""
        steps = max(FEWEST, round(self.given.stretch / (size * 128)))
        recipe = open_recipe(
            f"electra/{self.given.size}-{LABELS[label]}",
            [
                f"data.folder={self.given.data.resolve()}",
                f"training.batch={size}",
                f"training.compile={str(compiled).lower()}",
                f"data.steps={steps}",
                *self.given.set,
            ],
        )
        made = make_task(recipe)
        assert isinstance(made, PretrainingTask)
        if made.recipe.objective != "electra":
            raise ConfigError("objective: the operations of ELECTRA are counted; leave it out")
        return made

    def train(self) -> None:
        end = self.deadline
        if "trainer" in self.given.only:
            self.deadline = time.perf_counter() + FIRST * (end - time.perf_counter())
        took = 0.0
        for size in self.given.batches:
            if not self.fits("train", f"{size} sequences", took):
                continue
            began = time.perf_counter()
            with self._within_memory("train", size):
                self._train(size)
            took = time.perf_counter() - began
        self.deadline = end

    def _train(self, size: int) -> None:
        tasks = {label: self.task(label, size, compiled=self.given.compile) for label in LABELS}
        loops = {label: TimedLoop(task, self.given.device) for label, task in tasks.items()}
        for label, loop in loops.items():
            for _ in range(self.given.warm_up):
                self.check(f"warming up {label}, {size} sequences")
                taken = wall(loop.one_epoch, self.device)
                print(f"train: {size} sequences, {label}: a stretch of warm-up in {taken:.2f} s", flush=True)
        seconds = self.alternate({label: loop.one_epoch for label, loop in loops.items()})
        for label, loop in loops.items():
            held, needed = stretch_of(tasks[label], loop.steps)
            rates = self.rates(held, statistics.median(seconds[label]), loop.steps, needed)
            numbers = {"steps": loop.steps, "parameters": trained(loop.bare), "stretch_seconds": seconds[label]}
            if self.device.type == "cuda":
                numbers["peak_bytes"] = torch.cuda.max_memory_allocated()  # of both together
            self.note("train", f"{size} {label}", rates | numbers)
        found = asdict(compare(list(zip(seconds["SVGD"], seconds["MA"], strict=True)), draws=500))
        self.note("train", f"{size} ratio", {name: found[name] for name in ("ratio", "low", "high", "rounds")})
        for label, loop in loops.items():
            loop.handle.remove()
            inside = time_inside(unwrap_optimizer(loop.optimizer), loop.attached(), loop.one_step, self.device)
            step = statistics.median(seconds[label]) / loop.steps
            shares = {name.replace("seconds", "share"): value / step for name, value in inside.items()}
            self.note("train", f"{size} hooks of {label}", inside | shares)

    def trainer(self) -> None:
        from studies.speed.electra_trainer import Timer, by_trainer

        ways = {"Trainer": False} | ({"Trainer, compiled": True} if self.given.compile else {})
        took = dict.fromkeys(ways, 0.0)
        for size in self.given.batches:
            for label, compiled in ways.items():
                if not self.fits("trainer", f"{label}, {size} sequences", took[label]):
                    continue
                began = time.perf_counter()
                with self._within_memory("trainer", size):
                    task = self.task("MA", size, compiled=compiled)
                    held, needed = stretch_of(task, 1)
                    warm_up = max(1, min(20, self.given.steps // 2))
                    timer = Timer([held] * self.given.steps, warm_up, self.given.measure, self.device)
                    found = by_trainer(task, timer, self.given.workers)
                    rates = self.rates(found.tokens, found.seconds, found.steps, needed * found.steps)
                    self.note("trainer", f"{size} {label}", rates | {"steps": found.steps})
                took[label] = time.perf_counter() - began

    @contextmanager
    def _within_memory(self, part: str, size: int) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self.say(part, f"left out: {size} sequences, for which the device has too little memory")
        self.clear()
        torch.compiler.reset()  # compiled for one size; of too many, torch would compile none

    def _hooks(self) -> list[str]:
        rows = {name: row for name, row in self.facts.get("train", {}).items() if "hooks of" in name}
        lines = [line(*HEAD), line(*["---"] * len(HEAD))] if rows else []
        for name, row in rows.items():
            size, label = name.split(" hooks of ")
            times = [f"{1e3 * row[key]:.3f}" if key in row else "" for key in ("host_seconds", "device_seconds")]
            share = f"{100 * row['device_share']:.2f} %" if "device_share" in row else ""
            lines.append(line(f"{int(size):,}", label, *times, share))
        return [*lines, ""] if rows else []


def stretch_of(task: PretrainingTask, steps: int) -> tuple[int, float]:
    """Tokens of some steps, padding included as it is computed too, and their operations."""
    recipe, length = task.recipe, task.data.length
    blocks = steps * recipe.training.batch
    places = most_places(length, recipe.loss.masked)
    return blocks * length, blocks * operations(recipe.model, len(task.data.pieces.pieces), length, places)


def operations(sizes: Model, vocabulary: int, length: int, places: int) -> float:
    r"""Floating-point operations of training on one block, recomputation not counted.

    With $T$ pieces of which $N$ are to be guessed, $L$ layers of width $w$ and inner width $f$, embeddings of $e$ and
    $V$ pieces, a network takes in its forward pass

    $$n(w, f) = T e w + L (T (4 w^2 + 2 w f) + 2 T^2 w)$$

    multiplications with additions: from the embeddings to the width (nothing if $e = w$), q, k, v and output of every
    attention, feed-forward blocks, scores and sums of values. The discriminator takes $n(d, f) + T (d^2 + d)$, the
    generator, of width $g$ and inner width $h$, $n(g, h) + N (g e + e V)$. The backward pass takes twice as many, and
    each counts as two operations: six times that.

    Args:
        sizes: of the model.
        vocabulary: V.
        length: T.
        places: N.
    """

    def network(width: int, inner: int) -> int:
        layer = length * (4 * width**2 + 2 * width * inner) + 2 * length**2 * width
        return (length * sizes.embedding * width if width != sizes.embedding else 0) + sizes.layers * layer

    d, f, e = sizes.width, sizes.feed_forward, sizes.embedding
    g, h = int(d * sizes.generator), int(f * sizes.generator)
    discriminator = network(d, f) + length * (d**2 + d)
    generator = network(g, h) + places * (g * e + e * vocabulary)
    return 6.0 * (discriminator + generator)


def main(arguments: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder that `repulsive prepare pretrain` made")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/electra/speed"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for the recipes")
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 512, 1024], help="sequences a step")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds, for everything")
    parser.add_argument("--measure", type=float, default=8.0, help="seconds that a rate is measured over")
    parser.add_argument("--stretch", type=int, default=1 << 20, help="tokens of a stretch, about")
    parser.add_argument("--warm-up", type=int, default=2, help="stretches that do not count")
    parser.add_argument("--steps", type=int, default=2000, help="of `Trainer` at most, warm-up included")
    parser.add_argument("--workers", type=int, help="processes that fetch batches for `Trainer`; 4 on a GPU, else none")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="nothing is compiled")
    given = parser.parse_args(arguments)
    given.compile = given.compile and given.device == "cuda"
    given.workers = given.workers if given.workers is not None else 4 * (given.device == "cuda")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        failed = Bench(given, shlex.join(["python", "-m", "studies.speed.electra", *words])).run()
    except RepulsiveError as error:
        raise SystemExit(f"studies.speed.electra: {error}") from None
    if failed:
        raise SystemExit(f"studies.speed.electra: {', '.join(failed)} failed, see above")


if __name__ == "__main__":
    main()

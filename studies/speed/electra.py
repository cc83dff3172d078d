"""Speed of ELECTRA pre-training compared with transformers' `Trainer`, and the cost of repulsion, on one device.

    python -m studies.speed.electra --data prepared/pretrain --device cuda --out results/electra/speed

Needs a folder made by `repulsive prepare pretrain`, and transformers. Writes speed.json and speed.md to `--out`.

**train**: the recipes `electra/small-ma` and `electra/small-svgd` (repulsion in the discriminator's first layer) in
this package's training loop, with its batches, masks, optimizer, clipping and logging, but without evaluations and
checkpoints; captured as CUDA graphs, and on a GPU compiled. The first stretches of steps, which compile and capture,
are not counted; then stretches of the two recipes alternate. Each is timed until the device is idle again. A rate is
the number of tokens of a stretch over the median time. The cost of repulsion is the ratio of the two within rounds,
with a bootstrap interval, and the time of the optimizer's hooks inside steps. Plain training has such a hook, too: it
clips.

**trainer**: the same modules, batches, masks (by the same code, on the device) and precision under `Trainer`: autocast,
fused AdamW, the same clipping, worker processes that fetch batches into pinned memory; no logging, saving or checks of
the loss. Once with unchanged modules of transformers, and on a GPU once with those of this package's loop: hidden
states in half precision, layers compiled. A rate is the number of tokens of all steps after the warm-up over their
time, synchronised with the device at both ends.

Operations are 6 x the multiplications of a forward pass: see `operations`. The bf16 limit is that of the data sheet.

Every measurement is printed and saved at once, and added to those of earlier calls with the same settings, machine and
versions. `--limit` holds for all parts together: what does not fit, in time or in memory, is left out with a note.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from studies.speed.speed_bench import SpeedBench, count_parameters
from studies.speed.tables import origin, training
from studies.speed.timed_loop import TimedLoop

from repulsive.errors import ConfigError
from repulsive.lab.bench.clock import compare, wall_time
from repulsive.lab.bench.steps import time_inside
from repulsive.lab.systems.electra.masking import most_places
from repulsive.lab.systems.electra.task import Model, PretrainingTask
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.repulsion.attach import unwrap_optimizer
from repulsive.safety.markdown import format_table

LABELS = {"MA": "ma", "SVGD": "svgd"}
PARTS = ("train", "trainer")
SYSTEMS = {"train": "repulsive", "trainer": "transformers"}
SETTINGS = ("data", "device", "set", "size", "stretch", "compile", "workers")
TITLES = ("sequences", "training", "tokens/s", "ms a step", "TFLOP a step", "TFLOP/s", "of the bf16 limit")
HEAD = ("sequences", "hooks of", "host, ms a step", "device, ms a step", "device, of the step")
COUNTED = "Operations are 6 x the multiplications of a forward pass, padding included, see `operations`.  "
TRAIN_SHARE = 0.65  # of the time limit is for `train`, if both parts are measured
MIN_STEPS = 4  # of a stretch


class Bench(SpeedBench):
    """The benchmark of pre-training."""

    parts = PARTS
    settings = SETTINGS
    shared_limit = True

    def as_markdown(self) -> str:
        lines = ["# Speed of pre-training", "", *training(self.facts, SYSTEMS, TITLES, COUNTED), *self._hooks()]
        return "\n".join([*lines, *origin(self.facts, PARTS, "studies/speed/electra.py")]) + "\n"

    def task(self, label: str, size: int, *, compiled: bool) -> PretrainingTask:
        """The task of a recipe; its epochs are stretches of steps."""
        steps = max(MIN_STEPS, round(self.arguments.stretch / (size * 128)))
        recipe = open_recipe(
            f"electra/{self.arguments.size}-{LABELS[label]}",
            [
                f"data.folder={self.arguments.data.resolve()}",
                f"training.batch={size}",
                f"training.compile={str(compiled).lower()}",
                f"data.steps={steps}",
                *self.arguments.set,
            ],
        )
        made = make_task(recipe)
        assert isinstance(made, PretrainingTask)
        if made.recipe.objective != "electra":
            raise ConfigError("objective: expected electra, whose operations are counted; leave it out of --set")
        return made

    def train(self) -> None:
        end = self.deadline
        if "trainer" in self.arguments.only:
            self.deadline = time.perf_counter() + TRAIN_SHARE * (end - time.perf_counter())
        took = 0.0
        for size in self.arguments.batches:
            if not self.fits("train", f"{size} sequences", took):
                continue
            started = time.perf_counter()
            with self._within_memory("train", size):
                self._train(size)
            took = time.perf_counter() - started
        self.deadline = end

    def _train(self, size: int) -> None:
        tasks = {label: self.task(label, size, compiled=self.arguments.compile) for label in LABELS}
        loops = {label: TimedLoop(task, self.arguments.device) for label, task in tasks.items()}
        for label, loop in loops.items():
            for _ in range(self.arguments.warm_up):
                self.check_time(f"warming up {label}, {size} sequences")
                taken = wall_time(loop.one_epoch, self.device)
                print(f"train: {size} sequences, {label}: a stretch of warm-up in {taken:.2f} s", flush=True)
        seconds = self.alternate({label: loop.one_epoch for label, loop in loops.items()})
        for label, loop in loops.items():
            held, needed = stretch_of(tasks[label], loop.steps)
            rates = self.rates(held, statistics.median(seconds[label]), loop.steps, needed)
            numbers = {
                "steps": loop.steps,
                "parameters": count_parameters(loop.bare),
                "stretch_seconds": seconds[label],
            }
            if self.device.type == "cuda":
                numbers["peak_bytes"] = torch.cuda.max_memory_allocated()  # of both together
            self.record("train", f"{size} {label}", rates | numbers)
        ratio = asdict(compare(list(zip(seconds["SVGD"], seconds["MA"], strict=True)), draws=500))
        self.record("train", f"{size} ratio", {name: ratio[name] for name in ("ratio", "low", "high", "rounds")})
        for label, loop in loops.items():
            loop.handle.remove()
            inside = time_inside(unwrap_optimizer(loop.optimizer), loop.attached(), loop.one_step, self.device)
            step = statistics.median(seconds[label]) / loop.steps
            shares = {name.replace("seconds", "share"): value / step for name, value in inside.items()}
            self.record("train", f"{size} hooks of {label}", inside | shares)

    def trainer(self) -> None:
        from studies.speed.electra_trainer import Timer, train_with_trainer  # needs transformers

        ways = {"Trainer": False} | ({"Trainer, compiled": True} if self.arguments.compile else {})
        took = dict.fromkeys(ways, 0.0)
        for size in self.arguments.batches:
            for label, compiled in ways.items():
                if not self.fits("trainer", f"{label}, {size} sequences", took[label]):
                    continue
                started = time.perf_counter()
                with self._within_memory("trainer", size):
                    task = self.task("MA", size, compiled=compiled)
                    held, needed = stretch_of(task, 1)
                    warm_up = max(1, min(20, self.arguments.steps // 2))
                    timer = Timer([held] * self.arguments.steps, warm_up, self.arguments.measure, self.device)
                    stretch = train_with_trainer(task, timer, self.arguments.workers)
                    rates = self.rates(stretch.tokens, stretch.seconds, stretch.steps, needed * stretch.steps)
                    self.record("trainer", f"{size} {label}", rates | {"steps": stretch.steps})
                took[label] = time.perf_counter() - started

    @contextmanager
    def _within_memory(self, part: str, size: int) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self.add_note(part, f"left out: {size} sequences; the device has too little memory")
        self.clear()
        torch.compiler.reset()  # with code for too many sizes torch stops compiling

    def _hooks(self) -> list[str]:
        rows = {name: row for name, row in self.facts.get("train", {}).items() if "hooks of" in name}
        cells = []
        for name, row in rows.items():
            size, label = name.split(" hooks of ")
            times = [f"{1e3 * row[key]:.3f}" if key in row else "" for key in ("host_seconds", "device_seconds")]
            share = f"{100 * row['device_share']:.2f} %" if "device_share" in row else ""
            cells.append([f"{int(size):,}", label, *times, share])
        return [format_table(HEAD, cells), ""] if cells else []


def stretch_of(task: PretrainingTask, steps: int) -> tuple[int, float]:
    """Number of tokens of some steps, padding included, and of their operations."""
    recipe, length = task.recipe, task.data.length
    blocks = steps * recipe.training.batch
    places = most_places(length, recipe.loss.masked)
    return blocks * length, blocks * operations(recipe.model, len(task.data.pieces.pieces), length, places)


def operations(sizes: Model, vocabulary: int, length: int, places: int) -> float:
    r"""Floating-point operations of training on one block, without recomputation.

    With $T$ tokens of which $N$ are masked, $L$ layers of width $w$ and inner width $f$, embeddings of $e$ and
    a vocabulary of $V$, the forward pass of a network takes

    $$n(w, f) = T e w + L (T (4 w^2 + 2 w f) + 2 T^2 w)$$

    multiply-adds: the projection of the embeddings (none if $e = w$), q, k, v and output of every attention,
    feed-forward blocks, attention scores and weighted sums of values. The discriminator takes $n(d, f) + T (d^2 + d)$,
    the generator, of width $g$ and inner width $h$, $n(g, h) + N (g e + e V)$. The backward pass takes twice as many,
    and each counts as two operations: six times that.

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


def main(words: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder made by `repulsive prepare pretrain`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/electra/speed"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="size of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for the recipes")
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 512, 1024], help="sequences per step")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all parts together")
    parser.add_argument("--measure", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--stretch", type=int, default=1 << 20, help="approximate number of tokens of a stretch")
    parser.add_argument("--warm-up", type=int, default=2, help="stretches that are not counted")
    parser.add_argument("--steps", type=int, default=2000, help="maximum steps of `Trainer`, warm-up included")
    parser.add_argument("--workers", type=int, help="worker processes of `Trainer`; default 4 on a GPU, else 0")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not compile")
    arguments = parser.parse_args(words)
    arguments.compile = arguments.compile and arguments.device == "cuda"
    arguments.workers = arguments.workers if arguments.workers is not None else 4 * (arguments.device == "cuda")
    Bench.run_from_command_line("studies.speed.electra", arguments, words)


if __name__ == "__main__":
    main()

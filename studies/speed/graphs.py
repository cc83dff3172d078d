"""Speed of GraphWriter in training and writing: padded batches compared with one graph at a time, on one device.

    python -m studies.speed.graphs --data prepared/agenda --device cuda --out results/graphs/speed

Needs a folder made by `repulsive prepare graphs`. Writes speed.json and speed.md to `--out`.

**train**: the recipe `agenda/gw` in this package's training loop, with its batches, optimizer and clipping, on the same
batches of the first epoch: all graphs of a batch at once (on a GPU also without CUDA graphs), and one graph after the
other without padding, with gradients added up before the step. Both start from the same weights, and their losses, in
float64 without dropout, must agree before anything is timed. Warm-up and capture are not counted. Rounds of the
variants alternate; a rate is the number of texts of a round over its median time. bfloat16 on a GPU, float32 on a CPU.

**decode**: texts about `--graphs` graphs of the test set by this package's beam search. The cost depends on when texts
end, and untrained models end anywhere. So the end is made impossible and every text has `--longest` words, the maximum
work. It is timed for every batch size of `--at-once`, after a first call on one batch.

Every measurement is printed and saved at once; each part stops after `--limit` seconds if it can.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from studies.output import save
from studies.speed.timed_loop import TimedLoop
from torch import Tensor, nn

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.clock import wall_time
from repulsive.lab.engine.runs import versions
from repulsive.lab.engine.task import Forward, Inputs
from repulsive.lab.systems.graphs.batches import GraphBatch, Shape, in_batches
from repulsive.lab.systems.graphs.model import GraphWriter
from repulsive.lab.systems.graphs.search import write
from repulsive.lab.systems.graphs.task import ENDS, GraphWritingTask
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.safety.markdown import format_table

RECIPE = "agenda/gw"
LOOP, BATCHED, UNCAPTURED = "one graph after the other", "batched", "batched, not captured"
GOALS = {"times": 5.0, "seconds": 30.0}  # on an H200, with the recipe's sizes and 1,000 graphs
TOLERANCE = 1e-9  # relative difference of losses


class SingleGraphs:
    """Compute the loss of a batch one graph at a time.

    Args:
        task: provides the texts.
    """

    def __init__(self, task: GraphWritingTask) -> None:
        self.task = task
        tables = task.parts["train"]
        self._lengths = tables.targets.lengths
        self._sizes = tables.sizes()[tables.graphs]  # [T, 4], on the CPU, as the task is before it moves

    def losses(self, model: Forward, inputs: Inputs, indices: Sequence[int]) -> Iterator[Tensor]:
        """Contribution of each text to the loss of its batch, one at a time."""
        for place, text in enumerate(indices):
            one = {"indices": inputs["indices"][place : place + 1], "tokens": inputs["tokens"]}
            shape = Shape(*self._sizes[text].tolist())
            yield self.task.loss_at(model, one, int(self._lengths[text]), shape) / len(indices)


class Round(TimedLoop):
    """The training loop over the same batches in every round.

    Args:
        task: what is trained.
        device: "cpu" or "cuda".
        batches: of a round.
        single: trains one graph at a time; None for all graphs of a batch at once.
    """

    def __init__(
        self, task: GraphWritingTask, device: str, batches: list[GraphBatch], single: SingleGraphs | None
    ) -> None:
        super().__init__(task, device)
        self.batches, self._single = batches, single
        self.bare.train()
        self._compute_gradients = self._gradients
        if single is not None:
            self._gradients = self._one_by_one  # type: ignore[assignment]

    def round(self) -> None:
        for batch in self.batches:
            self._learn(batch)
            self.step += 1
        self.meter.reset()

    def _one_by_one(self, batch: GraphBatch) -> None:
        assert self._single is not None
        self.optimizer.zero_grad()
        moved = {name: x.to(self.device) for name, x in self.task.fetch(batch).items()}
        for loss in self._single.losses(self._compute_gradients.forward, moved, batch.indices.tolist()):
            loss.backward()


class Bench:
    """The benchmark and its measurements.

    Args:
        arguments: the parsed command line.
        command: the command line, for the report.
    """

    def __init__(self, arguments: argparse.Namespace, command: str) -> None:
        self.arguments, self.device = arguments, torch.device(arguments.device)
        machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
        self.facts: dict[str, Any] = {
            "command": command,
            "date": date.today().isoformat(),
            "machine": machine,
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }

    def run(self) -> None:
        for part in self.arguments.only:
            self._deadline = time.perf_counter() + self.arguments.limit
            getattr(self, part)()

    def is_late(self) -> bool:
        return time.perf_counter() > self._deadline

    def record(self, part: str, name: str, value: Any) -> None:
        """Print a measurement and save it."""
        self.facts.setdefault(part, {})[name] = value
        print(f"{part}: {name}: {value}", flush=True)
        save(self.arguments.out / "speed.json", self.facts)
        save(self.arguments.out / "speed.md", as_markdown(self.facts))

    def task(self, *more: str) -> GraphWritingTask:
        precision = "bf16" if self.arguments.device == "cuda" else "fp32"
        changes = [f"data.folder={self.arguments.data}", f"training.precision={precision}", *self.arguments.set, *more]
        task = make_task(open_recipe(RECIPE, changes))
        assert isinstance(task, GraphWritingTask)
        return task

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        task = self.task()
        single = SingleGraphs(task)
        batches = task.order(0)[: self.arguments.batches]
        texts, words = sum(map(len, batches)), sum(batch.tokens * len(batch) for batch in batches)
        numbers = {"batches": len(batches), "texts": texts, "words a text": words / texts}
        self.record("train", "round", numbers | {"precision": task.recipe.training.precision})
        self.record("train", "losses agree to", check_losses(task, single, batches[:2], self.device))
        loops = {BATCHED: Round(task, self.arguments.device, batches, None)}
        if self.arguments.device == "cuda":
            loops[UNCAPTURED] = Round(self.task("training.capture=false"), self.arguments.device, batches, None)
        loops[LOOP] = Round(task, self.arguments.device, batches, single)
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for name, loop in loops.items():
            loop.batches = batches[:1] if name == LOOP else batches  # it captures nothing
            for number in range(1 if name == LOOP else self.arguments.warm_up):
                taken = wall_time(loop.round, self.device)
                print(f"train: {name}: warm-up {number + 1} in {taken:.2f} s", flush=True)
            loop.batches = batches
        while not seconds[LOOP] or not self.is_late():
            for name, loop in loops.items():
                seconds[name].append(wall_time(loop.round, self.device))
            if len(seconds[LOOP]) == self.arguments.rounds:
                break
        slow = statistics.median(seconds[LOOP])
        for name, some in seconds.items():
            rate = {"texts_per_second": texts / statistics.median(some), "times": slow / statistics.median(some)}
            self.record("train", name, rate | {"seconds": some})

    # -- writing ------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        task = self.task()
        task.to(self.device)
        torch.manual_seed(task.recipe.seed)
        model = never_ends(task.model().to(self.device))
        sizes = task.parts["test"].to(torch.device("cpu")).sizes()[: self.arguments.graphs]
        for at_once in self.arguments.at_once:
            if self.is_late():
                return
            batches = in_batches(sizes, at_once)
            self._write(task, model, batches[-1:])  # warm-up
            taken = wall_time(lambda batches=batches: self._write(task, model, batches), self.device)
            numbers = {
                "graphs": len(sizes),
                "seconds": taken,
                "beam": self.arguments.beam,
                "words": self.arguments.longest,
            }
            self.record("decode", f"{at_once} at a time", numbers)

    def _write(self, task: GraphWritingTask, model: GraphWriter, batches: Sequence[tuple[Tensor, Shape]]) -> None:
        forbidden = range(len(MARKS) + len(task.data.vocabularies.types))
        settings = {"beam": self.arguments.beam, "longest": self.arguments.longest, "forbidden": forbidden}
        for indices, shape in batches:
            given = task.parts["test"].inputs(indices.to(self.device), shape)
            texts = write(model, *given, ENDS, **settings)
            if lengths := {len(text.tokens) + 1 for text in texts} - {self.arguments.longest}:
                raise RuntimeError(f"expected texts of {self.arguments.longest} words, got {sorted(lengths)}")


def check_losses(
    task: GraphWritingTask, single: SingleGraphs, batches: Sequence[GraphBatch], device: torch.device
) -> float:
    """Largest relative difference between a batch's loss and the sum over its graphs, in float64 without dropout.

    Raises:
        RuntimeError: it exceeds `TOLERANCE`.
    """
    task.to(device)
    torch.manual_seed(task.recipe.seed)
    model: nn.Module = task.model().double().to(device).eval()
    worst = 0.0
    for batch in batches:
        inputs = {name: x.to(device) for name, x in task.fetch(batch).items()}
        with torch.no_grad():
            whole = float(task.loss(model, inputs, batch.length))
            parts = sum(float(loss) for loss in single.losses(model, inputs, batch.indices.tolist()))
        worst = max(worst, abs(parts / whole - 1))
    if not worst < TOLERANCE:
        raise RuntimeError(f"the losses differ by {worst:.1e}; the two ways of training are not equivalent")
    return worst


@torch.no_grad()
def never_ends(model: GraphWriter) -> GraphWriter:
    """Make the end token so improbable that every text has the maximum length."""
    model.decoder.words.bias[EOS] -= 100.0
    return model.eval()


def as_markdown(facts: dict[str, Any]) -> str:
    """Format the measurements so far."""
    lines = ["# Speed of graphs to text", ""]
    train, decode = facts.get("train", {}), facts.get("decode", {})
    rows = {name: train[name] for name in (BATCHED, UNCAPTURED, LOOP) if name in train}
    if rows:
        work = train["round"]
        cells = [[name, f"{row['texts_per_second']:,.1f}", f"{row['times']:.2f}"] for name, row in rows.items()]
        lines.append(format_table(["training", "graphs a second", "times the loop"], cells))
        size = f"{work['texts']} texts of {work['words a text']:.0f} words in {work['batches']} batches"
        agree = f"losses agree to {train['losses agree to']:.1e}"
        lines += ["", f"{size}, {work['precision']}; {agree}; goal on an H200: {GOALS['times']:g} times the loop.", ""]
    if decode:
        cells = [
            [name.split()[0], f"{row['graphs']:,}", str(row["beam"]), str(row["words"]), f"{row['seconds']:.2f}"]
            for name, row in decode.items()
        ]
        lines.append(format_table(["graphs at a time", "graphs", "beam", "words each", "seconds"], cells))
        lines += [
            "",
            f"Every text has the maximum length. Goal on an H200: 1,000 graphs in {GOALS['seconds']:g} s.",
            "",
        ]
    installed = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines += [f"`{facts['command']}`, {facts['date']}. {facts['machine']}, {facts['threads']} threads; {installed}."]
    return "\n".join([*lines, "Method: studies/speed/graphs.py."]) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder made by `repulsive prepare graphs`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/graphs/speed"))
    parser.add_argument("--only", nargs="+", choices=("train", "decode"), default=["train", "decode"])
    parser.add_argument("--set", nargs="*", default=[], help="key=value for the recipe")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each part; rounds are not interrupted")
    parser.add_argument("--batches", type=int, default=8, help="batches of a round of training")
    parser.add_argument(
        "--warm-up", type=int, default=4, help="rounds that are not counted; CUDA graphs are captured in them"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted, if there is time")
    parser.add_argument("--graphs", type=int, default=1000, help="test graphs to write about")
    parser.add_argument("--at-once", nargs="+", type=int, default=[64, 256, 1000], help="graphs per batch of writing")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--longest", type=int, default=200)
    arguments = parser.parse_args(words)
    words = sys.argv[1:] if words is None else words
    try:
        Bench(arguments, shlex.join(["python", "-m", "studies.speed.graphs", *words])).run()
    except RepulsiveError as error:
        raise SystemExit(f"studies.speed.graphs: {error}") from None


if __name__ == "__main__":
    main()

"""How fast GraphWriter trains and writes: batches of padded graphs against a loop over the graphs, on one device.

    python -m studies.speed.graphs --data prepared/agenda --device cuda --out results/graphs/speed

**train**: the recipe `agenda/gw` in the project's own loop, with its batches, optimiser and clipping, on the same few
batches of the first epoch: all graphs of a batch at once (on a GPU also without captured CUDA graphs), and one graph
after the other, each without padding, their gradients added up before the step. Both start from the same weights, and
before anything is timed their losses, in float64 without dropout, must be equal. What warms up, and captures, does not
count. Rounds of the variants take turns; a rate is the texts of a round over its median time. bfloat16 on a GPU,
float32 on a CPU.

**decode**: texts about `--graphs` graphs of the test set by the project's beam search. What it costs depends on when
texts end, and untrained models end anywhere. So the end is never chosen and every text has `--longest` words: the most
work there can be. It is timed for every number of graphs at a time that is asked for, after a first call on one batch.

Everything is printed and written to speed.json and speed.md; each part stops at `--limit` seconds, where it can.
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
from repulsive.lab.bench.clock import wall
from repulsive.lab.engine.runs import versions
from repulsive.lab.engine.task import Forward, Inputs
from repulsive.lab.systems.graphs.batches import GraphBatch, Shape, in_batches
from repulsive.lab.systems.graphs.model import GraphWriter
from repulsive.lab.systems.graphs.search import write
from repulsive.lab.systems.graphs.task import ENDS, GraphWritingTask
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.pieces import EOS, MARKS

RECIPE = "agenda/gw"
LOOP, BATCHED, UNCAPTURED = "one graph after the other", "batched", "batched, not captured"
GOALS = {"times": 5.0, "seconds": 30.0}  # of an H200, with the recipe's own sizes and 1,000 graphs
CLOSE = 1e-9


class Alone:
    """The loss of a batch, graph by graph.

    Args:
        task: whose texts.
    """

    def __init__(self, task: GraphWritingTask) -> None:
        self.task = task
        tables = task.parts["train"]
        self._lengths = tables.targets.lengths
        self._sizes = tables.sizes()[tables.graphs]  # [T, 4], on the CPU, as the task is before it moves

    def losses(self, model: Forward, inputs: Inputs, indices: Sequence[int]) -> Iterator[Tensor]:
        """What each text adds to the loss of its batch, one at a time."""
        for place, text in enumerate(indices):
            one = {"indices": inputs["indices"][place : place + 1], "tokens": inputs["tokens"]}
            shape = Shape(*self._sizes[text].tolist())
            yield self.task.loss_at(model, one, int(self._lengths[text]), shape) / len(indices)


class Round(TimedLoop):
    """The training loop over some batches, again and again.

    Args:
        task: what is trained.
        device: "cpu" or "cuda".
        batches: of a round.
        alone: None: all graphs of a batch at once.
    """

    def __init__(self, task: GraphWritingTask, device: str, batches: list[GraphBatch], alone: Alone | None) -> None:
        super().__init__(task, device)
        self.batches, self._alone = batches, alone
        self.bare.train()
        if alone is not None:
            self._gradients = self._one_by_one

    def round(self) -> None:
        for batch in self.batches:
            self._indices = batch.indices.tolist()
            self._learn(batch)
            self.step += 1
        self.meter.reset()

    def _one_by_one(self, inputs: Inputs, length: int) -> None:
        assert self._alone is not None
        self.optimizer.zero_grad()
        moved = {name: x.to(self.device) for name, x in inputs.items()}
        for loss in self._alone.losses(self._forward, moved, self._indices):
            loss.backward()


class Bench:
    """What is measured, on what, and how far it is.

    Args:
        given: the command line, parsed.
        command: as it was given.
    """

    def __init__(self, given: argparse.Namespace, command: str) -> None:
        self.given, self.device = given, torch.device(given.device)
        machine = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
        self.facts: dict[str, Any] = {
            "command": command,
            "date": date.today().isoformat(),
            "machine": machine,
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }

    def run(self) -> None:
        for part in self.given.only:
            self._until = time.perf_counter() + self.given.limit
            getattr(self, part)()

    def late(self) -> bool:
        return time.perf_counter() > self._until

    def note(self, part: str, name: str, value: Any) -> None:
        """Print a finding and keep it, on disk."""
        self.facts.setdefault(part, {})[name] = value
        print(f"{part}: {name}: {value}", flush=True)
        save(self.given.out / "speed.json", self.facts)
        save(self.given.out / "speed.md", as_markdown(self.facts))

    def task(self, *more: str) -> GraphWritingTask:
        precision = "bf16" if self.given.device == "cuda" else "fp32"
        changes = [f"data.folder={self.given.data}", f"training.precision={precision}", *self.given.set, *more]
        task = make_task(open_recipe(RECIPE, changes))
        assert isinstance(task, GraphWritingTask)
        return task

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        task = self.task()
        alone = Alone(task)
        batches = task.order(0)[: self.given.batches]
        texts, words = sum(map(len, batches)), sum(batch.tokens * len(batch) for batch in batches)
        found = {"batches": len(batches), "texts": texts, "words a text": words / texts}
        self.note("train", "round", found | {"precision": task.recipe.training.precision})
        self.note("train", "losses agree to", check_losses(task, alone, batches[:2], self.device))
        loops = {BATCHED: Round(task, self.given.device, batches, None)}
        if self.given.device == "cuda":
            loops[UNCAPTURED] = Round(self.task("training.capture=false"), self.given.device, batches, None)
        loops[LOOP] = Round(task, self.given.device, batches, alone)
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for name, loop in loops.items():
            loop.batches = batches[:1] if name == LOOP else batches  # it has nothing to capture
            for number in range(1 if name == LOOP else self.given.warm_up):
                taken = wall(loop.round, self.device)
                print(f"train: {name}: warm-up {number + 1} in {taken:.2f} s", flush=True)
            loop.batches = batches
        while not seconds[LOOP] or not self.late():
            for name, loop in loops.items():
                seconds[name].append(wall(loop.round, self.device))
            if len(seconds[LOOP]) == self.given.rounds:
                break
        slow = statistics.median(seconds[LOOP])
        for name, some in seconds.items():
            rate = {"texts_per_second": texts / statistics.median(some), "times": slow / statistics.median(some)}
            self.note("train", name, rate | {"seconds": some})

    # -- writing ------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        task = self.task()
        task.to(self.device)
        torch.manual_seed(task.recipe.seed)
        model = never_ends(task.model().to(self.device))
        sizes = task.parts["test"].to(torch.device("cpu")).sizes()[: self.given.graphs]
        for at_once in self.given.at_once:
            if self.late():
                return
            batches = in_batches(sizes, at_once)
            self._write(task, model, batches[-1:])  # libraries set themselves up
            taken = wall(lambda batches=batches: self._write(task, model, batches), self.device)
            found = {"graphs": len(sizes), "seconds": taken, "beam": self.given.beam, "words": self.given.longest}
            self.note("decode", f"{at_once} at a time", found)

    def _write(self, task: GraphWritingTask, model: GraphWriter, batches: Sequence[tuple[Tensor, Shape]]) -> None:
        forbidden = range(len(MARKS) + len(task.data.vocabularies.types))
        settings = {"beam": self.given.beam, "longest": self.given.longest, "forbidden": forbidden}
        for indices, shape in batches:
            given = task.parts["test"].inputs(indices.to(self.device), shape)
            texts = write(model, *given, ENDS, **settings)
            if lengths := {len(text.tokens) + 1 for text in texts} - {self.given.longest}:
                raise RuntimeError(f"texts of {sorted(lengths)} words, not {self.given.longest}")


def check_losses(task: GraphWritingTask, alone: Alone, batches: Sequence[GraphBatch], device: torch.device) -> float:
    """The largest relative difference between a batch's loss and the sum of its graphs', in float64 without dropout.

    Raises:
        RuntimeError: it is not small.
    """
    task.to(device)
    torch.manual_seed(task.recipe.seed)
    model: nn.Module = task.model().double().to(device).eval()
    worst = 0.0
    for batch in batches:
        inputs = {name: x.to(device) for name, x in task.fetch(batch).items()}
        with torch.no_grad():
            whole = float(task.loss(model, inputs, batch.length))
            parts = sum(float(loss) for loss in alone.losses(model, inputs, batch.indices.tolist()))
        worst = max(worst, abs(parts / whole - 1))
    if not worst < CLOSE:
        raise RuntimeError(f"the losses differ by {worst:.1e}: nothing to compare")
    return worst


@torch.no_grad()
def never_ends(model: GraphWriter) -> GraphWriter:
    """Make the end the least probable word by far: it comes at the longest alone."""
    model.decoder.words.bias[EOS] -= 100.0
    return model.eval()


def as_markdown(facts: dict[str, Any]) -> str:
    """What is known so far."""
    lines = ["# Speed of graphs to text", ""]
    train, decode = facts.get("train", {}), facts.get("decode", {})
    rows = {name: train[name] for name in (BATCHED, UNCAPTURED, LOOP) if name in train}
    if rows:
        told = train["round"]
        lines += ["| training | graphs a second | times the loop |", "| --- | --- | --- |"]
        lines += [f"| {name} | {row['texts_per_second']:,.1f} | {row['times']:.2f} |" for name, row in rows.items()]
        size = f"{told['texts']} texts of {told['words a text']:.0f} words in {told['batches']} batches"
        agree = f"losses agree to {train['losses agree to']:.1e}"
        lines += ["", f"{size}, {told['precision']}; {agree}; goal on an H200: {GOALS['times']:g} times the loop.", ""]
    if decode:
        lines += ["| graphs at a time | graphs | beam | words each | seconds |", "| --- | --- | --- | --- | --- |"]
        for name, row in decode.items():
            lines.append(
                f"| {name.split()[0]} | {row['graphs']:,} | {row['beam']} | {row['words']} | {row['seconds']:.2f} |"
            )
        lines += ["", f"No text ends before its longest. Goal on an H200: 1,000 graphs in {GOALS['seconds']:g} s.", ""]
    known = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines += [f"`{facts['command']}`, {facts['date']}. {facts['machine']}, {facts['threads']} threads; {known}."]
    return "\n".join([*lines, "What is measured, and how: studies/speed/graphs.py."]) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder that `repulsive prepare graphs` made")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/graphs/speed"))
    parser.add_argument("--only", nargs="+", choices=("train", "decode"), default=["train", "decode"])
    parser.add_argument("--set", nargs="*", default=[], help="key=value, for the recipe")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each part; a round is never cut")
    parser.add_argument("--batches", type=int, default=8, help="of a round of training")
    parser.add_argument("--warm-up", type=int, default=4, help="rounds that do not count; graphs are captured in them")
    parser.add_argument("--rounds", type=int, default=5, help="that count, if there is time")
    parser.add_argument("--graphs", type=int, default=1000, help="of the test set, to write about")
    parser.add_argument("--at-once", nargs="+", type=int, default=[64, 256, 1000], help="graphs at a time")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--longest", type=int, default=200)
    given = parser.parse_args(words)
    told = sys.argv[1:] if words is None else words
    try:
        Bench(given, shlex.join(["python", "-m", "studies.speed.graphs", *told])).run()
    except RepulsiveError as error:
        raise SystemExit(f"studies.speed.graphs: {error}") from None


if __name__ == "__main__":
    main()

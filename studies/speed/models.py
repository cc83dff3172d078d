"""Cost of rules in training steps of transformers models, eager and compiled: all models of `repulsive bench --model`.

    python -m studies.speed.models --device cuda --rounds 12 --steps 4 --out results/bench

Every measurement is a process of its own. All processes build, compile and warm up their models side by side, which
takes as long as the slowest of them, and then measure one after the other, while the others wait. A measurement is that
of `repulsive bench --model MODEL --full --json OUT/models-NAME.json`, where NAME is MODEL, MODEL-compiled (with
`--compile`) or MODEL-graphs (with `--compile --cuda-graphs`).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.command import bench_model, choose_device
from repulsive.lab.bench.presets import PRESETS

RULES = ("sphere", "logits", "paper", "spos")
COMPILED, GRAPHS = "-compiled", "-graphs"  # endings of names: with torch.compile, and with CUDA graphs as well
_WARM = "time inside hooks"  # start of the progress line that ends the warm-up


class Queue:
    """Let processes measure one at a time, after all of them are ready or have failed.

    Args:
        folder: folder that all processes share.
        count: number of processes.
        patience: seconds to wait for the slowest process.
    """

    def __init__(self, folder: Path, count: int, patience: float) -> None:
        self._folder, self._count, self._patience = folder, count, patience
        self._lock: TextIO | None = None

    def arrive(self, name: str) -> None:
        """Note that a process is ready, or has failed."""
        (self._folder / f"{name}.ready").touch()

    def wait(self, name: str) -> None:
        """Note that a process is ready, and wait for its turn, which ends with the process."""
        self.arrive(name)
        end = time.monotonic() + self._patience
        while len(list(self._folder.glob("*.ready"))) < self._count and time.monotonic() < end:
            time.sleep(0.1)
        self._lock = (self._folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)


def measure(name: str, arguments: argparse.Namespace, queue: Queue) -> None:
    """Measure one model, and write OUT/models-NAME.json; print a line instead if it fails."""
    started, waited = time.monotonic(), False

    def progress(line: str) -> None:
        nonlocal waited
        print(f"{name}, {time.monotonic() - started:.0f} s: {line}", flush=True)
        if line.startswith(_WARM) and not waited:
            waited = True
            queue.wait(name)

    try:
        facts = bench_model(
            name.removesuffix(COMPILED).removesuffix(GRAPHS),
            [*arguments.rules, *(arguments.more_rules if name in arguments.more_models else ())],
            device=arguments.device,
            rounds=arguments.rounds,
            seconds=None if arguments.rounds else arguments.seconds,
            steps=arguments.steps,
            layers=arguments.layers,
            batch=arguments.batch,
            compiled=name.endswith((COMPILED, GRAPHS)),
            cuda_graphs=name.endswith(GRAPHS),
            json_file=arguments.out / f"models-{name}.json",
            progress=progress,
            show=False,
        )
    except RepulsiveError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(format_costs(name, facts["results"]), flush=True)
    finally:
        queue.arrive(name)


def measure_in_turn(target: Callable[[str, argparse.Namespace, Queue], None], arguments: argparse.Namespace) -> None:
    """Start a process for each of `arguments.models`, and wait for all of them.

    Args:
        target: called in each process with the name of the model, the arguments and the queue.
        arguments: of the command line, with `models` and `patience`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="repulsive-bench-") as folder:
        queue = Queue(Path(folder), len(arguments.models), arguments.patience)
        processes = [context.Process(target=target, args=(name, arguments, queue)) for name in arguments.models]
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: an interrupt ends this process only
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, handler)
        try:
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
                process.join()


def format_costs(name: str, results: dict[str, dict]) -> str:
    """Format ratio, interval and bound of each rule, one line each."""
    lines = [f"{name}: plain step {1e3 * results['plain']['seconds']:.2f} ms"]
    for rule, row in results.items():
        if rule != "plain":
            bound = "" if row["bound"] is None else f", bound {row['bound']:.4f}"
            lines.append(f"  {rule:12} {row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f}){bound}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name + ending for ending in (COMPILED, "", GRAPHS) for name in PRESETS]
    usual = [name for name in every if not name.endswith(GRAPHS)]
    parser.add_argument("--models", nargs="+", default=usual, choices=every, help="in this order")
    parser.add_argument("--rules", nargs="+", default=list(RULES), help="rules to measure")
    parser.add_argument("--more-rules", nargs="+", default=[], help="further rules, for --more-models only")
    parser.add_argument("--more-models", nargs="+", default=[], choices=every, help="models with --more-rules")
    parser.add_argument("--seconds", type=float, default=18, help="time for the rounds of each model")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each model, in place of --seconds")
    parser.add_argument("--steps", type=int, help="ordinary steps of a turn; 2 by default")
    parser.add_argument("--patience", type=float, default=200, help="seconds to wait for the slowest warm-up")
    parser.add_argument("--device", default="", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--layers", type=int, help="number of layers, for a quick trial")
    parser.add_argument("--batch", type=int, help="sequences or images per step, for a quick trial")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of JSON files")
    arguments = parser.parse_args(words)
    arguments.device = choose_device(arguments.device)
    paths = [arguments.out / f"models-{name}.json" for name in arguments.models]
    before = [_modified(path) for path in paths]
    try:
        measure_in_turn(measure, arguments)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; models that were measured are in their files\n")
    finally:
        written = [path.name for path, earlier in zip(paths, before, strict=True) if _modified(path) != earlier]
        print(json.dumps({"written": written}), flush=True)


def _modified(path: Path) -> int | None:
    """Return the time of the last change of a file; None if there is no such file."""
    return path.stat().st_mtime_ns if path.is_file() else None


if __name__ == "__main__":
    main()

"""Cost of repulsion between logits: train the 500 steps in which it acts, and as many plain ones.

    python -m studies.speed.first_steps --device cuda --out results/bench

`repulsive bench` times a few steps of each kind, which are never repeated at once, and adds them up. Here a model is
really trained from step 0: the rule computes new forces in 192 of its 500 steps, and then ends. Plain steps are trained
before and after. The cost over a training of 10,000 steps is (seconds with the rule - plain seconds) / (10,000 plain
steps), plus what the hooks cost after the end of the rule.

All models are built and compiled side by side, and then measure one at a time (`studies.speed.models`). Writes
OUT/first-steps-NAME.json, after each of the four parts, and OUT/first-steps.md from the complete ones. `--profile` also
writes OUT/first-steps-NAME.txt: operators and calls of the driver in five steps that compute a force and in five plain
ones, which shows where a step waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from studies.output import save
from studies.speed.models import COMPILED, Queue, measure_in_turn

from repulsive import repel
from repulsive.errors import RepulsiveError
from repulsive.lab.bench.clock import paused_garbage_collection, synchronise, wall_time
from repulsive.lab.bench.command import choose_device
from repulsive.lab.bench.machine import describe
from repulsive.lab.bench.presets import PRESETS, find_preset
from repulsive.lab.bench.training_variants import SharedModel, compile_apart
from repulsive.lab.bench.turns import TRAINING
from repulsive.safety.markdown import format_table

ACTIVE = 500  # steps in which the rule "logits" acts
BLOCK = 50  # steps that are timed together
WARM_UP = 5
PARTS = ("plain before", "active", "ended", "plain after")


def measure(name: str, arguments: argparse.Namespace, queue: Queue) -> None:
    """Measure one model, and write OUT/first-steps-NAME.json after each part; print a line if it fails."""
    try:
        facts = _measure(name, arguments, lambda: queue.wait(name), partial(save, _path(arguments.out, name)))
    except (RepulsiveError, torch.OutOfMemoryError) as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(json.dumps(summary(facts)), flush=True)
    finally:
        queue.arrive(name)


def _path(folder: Path, name: str) -> Path:
    return folder / f"first-steps-{name}.json"


def _measure(
    name: str, arguments: argparse.Namespace, wait: Callable[[], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    device, compiled = arguments.device, name.endswith(COMPILED)
    preset = find_preset(name.removesuffix(COMPILED))
    batch, length = preset.size(device, arguments.batch)
    model = preset.build(device, layers=arguments.layers, length=length)
    shared = SharedModel(model, preset.inputs(model.config, batch, length, device), compiled=compiled)

    def train(part: str, forward: Any, steps: int) -> None:
        """Take steps in blocks, and save the seconds of a step of each block."""
        blocks = [min(BLOCK, steps - first) for first in range(0, steps, BLOCK)]
        facts["seconds"][part] = [
            wall_time(lambda: _steps(shared, forward, count), shared.device) / count  # noqa: B023
            for count in blocks
        ]
        keep(facts)

    repelled = compile_apart(model) if compiled else model
    handle = repel(repelled, shared.optimizer, rule="logits", verbose=False)
    settings = {"model": name, "batch": batch, "length": length, "steps": arguments.steps, "rule": repr(handle.rule)}
    facts: dict[str, Any] = describe(device) | {"settings": settings, "seconds": {}}
    _steps(shared, repelled, WARM_UP)
    handle.remove()
    _steps(shared, shared.forward, WARM_UP)
    wait()
    with paused_garbage_collection():
        train("plain before", shared.forward, arguments.steps // 2)
        handle.steps = 0
        handle.attach()
        train("active", repelled, arguments.steps)
        handle.steps = max(handle.steps, ACTIVE)
        train("ended", repelled, arguments.steps // 2)
        handle.remove()
        train("plain after", shared.forward, arguments.steps // 2)
    if arguments.profile:
        plain = _profile(shared, shared.forward)
        handle.steps = 0
        handle.attach()
        repelling = _profile(shared, repelled)
        handle.remove()
        save(arguments.out / f"first-steps-{name}.txt", f"new forces\n\n{repelling}\n\nplain\n\n{plain}\n")
    return facts


def _steps(shared: SharedModel, forward: Any, count: int) -> None:
    for _ in range(count):
        with torch.autocast(shared.device.type, dtype=torch.bfloat16, enabled=shared.on_gpu):
            loss = forward(**shared.inputs).loss
        loss.backward()
        shared.optimizer.step()
        shared.optimizer.zero_grad()


def _profile(shared: SharedModel, forward: Any, steps: int = 5) -> str:
    """Profile a few steps; return the operators and driver calls that take the host most time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if shared.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        _steps(shared, forward, steps)
        synchronise(shared.device)
    table: str = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60)
    return table


def summary(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise one model: seconds of a step, plain and with the rule, and the ratio over a training."""
    seconds = facts["seconds"]
    plain = statistics.median([*seconds["plain before"], *seconds["plain after"]])
    active, ended = statistics.fmean(seconds["active"]), statistics.median(seconds["ended"])
    average = (ACTIVE * active + (TRAINING - ACTIVE) * ended) / TRAINING
    only = (ACTIVE * active + (TRAINING - ACTIVE) * plain) / TRAINING
    before, after = (statistics.median(seconds[f"plain {when}"]) for when in ("before", "after"))
    return {
        "model": facts["settings"]["model"],
        "plain": plain,
        "plain after / before": after / before,
        "active / plain": active / plain,
        "ended / plain": ended / plain,
        "training / plain": average / plain,
        "training / plain, free after the end": only / plain,
    }


def write_table(folder: Path) -> None:
    """Write first-steps.md from all first-steps-*.json of a folder; files of interrupted runs are left out."""
    stored = [json.loads(path.read_text()) for path in sorted(folder.glob("first-steps-*.json"))]
    found = [facts for facts in stored if set(PARTS) <= set(facts["seconds"])]
    if not found:
        return
    rows = []
    for facts in found:
        numbers = summary(facts)
        ratios = [f"{value:.4f}" for name, value in numbers.items() if "/" in name]
        rows.append([numbers["model"], f"{1e3 * numbers['plain']:.1f}", *ratios])
    head = ("model", "plain step, ms", *(name for name in summary(found[0]) if "/" in name))
    first, text = found[0], (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    machine = f"{first['machine']}, torch {first['versions']['torch']}, {first['date']}"
    save(folder / "first-steps.md", f"# The first 500 steps\n\n{text}\n\n{format_table(head, rows)}\n\n{machine}\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name + ending for ending in (COMPILED, "") for name in PRESETS]
    parser.add_argument("--models", nargs="+", default=every, choices=every, help="in this order")
    parser.add_argument("--steps", type=int, default=ACTIVE, help="steps with the rule; fewer for a trial")
    parser.add_argument("--patience", type=float, default=200, help="seconds to wait for the slowest warm-up")
    parser.add_argument("--device", default="", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--layers", type=int, help="number of layers, for a quick trial")
    parser.add_argument("--batch", type=int, help="sequences or images per step, for a quick trial")
    parser.add_argument("--profile", action="store_true", help="also profile five steps of each kind")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of JSON files")
    arguments = parser.parse_args(words)
    arguments.device = choose_device(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    measure_in_turn(measure, arguments)
    write_table(arguments.out)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Step times with repulsion or a regularizer, relative to plain attention: measured once, then read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.lab.bench.steps import VOCABULARY, Workload, measure_steps
from repulsive.lab.bench.steps import Options as BenchOptions
from repulsive.lab.engine.files import read_json, write_json
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.systems.translation.model import TransformerConfig

FILE = "step-times.json"
TOKENS, ROUNDS = {"cuda": 4096, "cpu": 2048}, {"cuda": 300, "cpu": 12}
TOY_TOKENS, TOY_ROUNDS = 64, 5


@dataclass(frozen=True)
class TimeRatio:
    """Step time relative to plain attention, and its 95 % interval."""

    ratio: float
    low: float
    high: float


def step_times(variants: Sequence[str], options: Options, log: Log) -> dict[str, TimeRatio]:
    """Measure step times of the paper's Transformer-small; variants in the file are not measured again.

    Args:
        variants: names in `bench.steps.VARIANTS`.
        options: folder of the file, and device.
        log: receives progress messages.
    """
    device = str(chosen_device(options.device).type)
    tokens, rounds = (TOY_TOKENS, TOY_ROUNDS) if options.toy else (TOKENS[device], ROUNDS[device])
    path = options.out / FILE
    ratios = _stored_ratios(path, device, tokens)
    missing = [name for name in dict.fromkeys(variants) if name not in ratios]
    if missing:
        log(f"measuring step times on {device}: {', '.join(missing)}")
        small = TransformerConfig(VOCABULARY, 32, layers=(1, 1), feed_forward=64) if options.toy else None
        workload = Workload(BenchOptions(device, (tokens,), tuple(missing), rounds=rounds), small)
        measured = measure_steps(workload, tokens, missing, log)
        ratios |= {name: [row["ratio"], row["low"], row["high"]] for name, row in measured.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"device": device, "tokens": tokens, "ratios": ratios})
    return {name: TimeRatio(*ratio) for name, ratio in ratios.items()}


def _stored_ratios(path: Path, device: str, tokens: int) -> dict[str, list[float]]:
    """Read the ratios in the file; empty if they were measured on another device or batch size."""
    stored = read_json(path)
    if not isinstance(stored, dict) or (stored.get("device"), stored.get("tokens")) != (device, tokens):
        return {}
    return dict(stored["ratios"])

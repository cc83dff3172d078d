"""What a step takes with repulsion or a regulariser, relative to plain attention: measured once, then kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.lab.bench.steps import VOCABULARY, Workload, measure_steps
from repulsive.lab.bench.steps import Options as BenchOptions
from repulsive.lab.engine.files import read_json, write_json
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.paper.running import Options, Tell
from repulsive.lab.systems.translation.model import TransformerConfig

FILE = "step-times.json"
TOKENS, ROUNDS = {"cuda": 4096, "cpu": 2048}, {"cuda": 300, "cpu": 12}
TOY_TOKENS, TOY_ROUNDS = 64, 5


@dataclass(frozen=True)
class Ratio:
    """Time of a step over that of plain attention, and its 95 % interval."""

    ratio: float
    low: float
    high: float


def step_times(variants: Sequence[str], options: Options, tell: Tell) -> dict[str, Ratio]:
    """Times of the paper's Transformer-small, interleaved with plain steps; those in the file are not taken again.

    Args:
        variants: of `bench.steps.VARIANTS`.
        options: where the file is, and on which device.
        tell: told what is going on.
    """
    device = str(chosen_device(options.device).type)
    tokens, rounds = (TOY_TOKENS, TOY_ROUNDS) if options.toy else (TOKENS[device], ROUNDS[device])
    path = options.out / FILE
    known = _known(path, device, tokens)
    wanted = [name for name in dict.fromkeys(variants) if name not in known]
    if wanted:
        tell(f"timing steps on {device}: {', '.join(wanted)}")
        small = TransformerConfig(VOCABULARY, 32, layers=(1, 1), feed_forward=64) if options.toy else None
        work = Workload(BenchOptions(device, (tokens,), tuple(wanted), rounds=rounds), small)
        found = measure_steps(work, tokens, wanted, tell)
        known |= {name: [row["ratio"], row["low"], row["high"]] for name, row in found.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"device": device, "tokens": tokens, "ratios": known})
    return {name: Ratio(*ratio) for name, ratio in known.items()}


def _known(path: Path, device: str, tokens: int) -> dict[str, list[float]]:
    kept = read_json(path)
    if not isinstance(kept, dict) or (kept.get("device"), kept.get("tokens")) != (device, tokens):
        return {}
    return dict(kept["ratios"])

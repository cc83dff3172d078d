"""Effect of repulsion between attention logits on small byte-level language models: train every arm on one GPU.

    python -m studies.logits.train --size tiny --arms decide --seeds 5 --data europarl --out results.jsonl

Needs `train.en.xz` and `valid.en.xz` (or `train.bin.xz`, `valid.bin.xz`) in `--data`: plain text, read as bytes. Writes
one JSON line per model; `studies.logits.tables` turns them into results/logits.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from studies.logits.arms import RATES, SETS, SIZES, named
from studies.logits.ensemble import Wave
from studies.logits.settings import Run
from torch import Tensor


def main() -> None:
    options = _options()
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES[options.size]
    given = {name: getattr(options, name) for name in ("steps", "batch", "heads", "width", "layers", "kv_heads")}
    size = replace(size, tied=options.tied, **{name: value for name, value in given.items() if value})
    train, valid = (_bytes(options.data, part, options.bytes).to(device) for part in ("train", "valid"))
    rates = tuple(float(r) for r in options.rates.split(",")) if options.rates else RATES[options.size]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [Run(arm, rate, seed) for rate in rates for arm in named(options.arms) for seed in seeds]
    waves = math.ceil(len(runs) / options.models)
    each = math.ceil(len(runs) / waves)
    print(f"{len(runs)} models of {size} in {waves} waves of {each}; {len(train) / 1e6:.1f} MB of text", flush=True)
    begun = time.perf_counter()
    for number in range(waves):
        some = runs[number * each : (number + 1) * each]
        some += some[: each - len(some)]  # all waves have the same shape, so that they are compiled once
        wave = Wave(size, some, device, compile=not options.eager)
        rows = _train(wave, train, valid, begun, options)
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        del wave
        torch.cuda.empty_cache()


def _train(wave: Wave, train: Tensor, valid: Tensor, begun: float, options: argparse.Namespace) -> list[dict]:
    size, runs = wave.size, wave.runs
    seeds = sorted({run.seed for run in runs})
    of = torch.tensor([seeds.index(run.seed) for run in runs], device=wave.device)
    starts = torch.stack([_starts(len(train), wave, seed) for seed in seeds]).to(wave.device)  # [seeds, steps, B]
    reach = torch.arange(size.length + 1, device=wave.device)
    logged: list[dict[str, list[float]]] = [{"step": [], "loss": [], "mean": [], "largest": []} for _ in runs]
    final: list[float | None] = [None] * len(runs)
    for step in range(wave.steps):
        tokens = train[starts[:, step, :, None] + reach].long()[of]  # [E, B, T + 1]
        loss, within = wave.step(step, tokens)
        if step % max(1, size.steps // 20) == 0 or step == size.steps - 1:
            mean, largest = _similarity(within)
            for e, log in enumerate(logged):
                log["step"].append(step)
                log["loss"].append(round(float(loss[e]), 5))
                log["mean"].append([round(v, 4) for v in mean[e].tolist()])
                log["largest"].append([round(v, 4) for v in largest[e].tolist()])
            print(f"step {step} loss {float(loss[0]):.4f} {time.perf_counter() - begun:.0f} s", flush=True)
        if options.evaluate_every and (step + 1) % options.evaluate_every == 0:
            for log, score in zip(logged, _evaluate(wave, valid, options.eval_batches).tolist(), strict=True):
                log.setdefault("dev", []).append(round(score, 5))
        if step == size.steps - 1 or step == wave.steps - 1:
            scores = _evaluate(wave, valid, options.eval_batches)
            for e, run in enumerate(runs):
                if step == round(size.steps * (1 + run.arm.extra)) - 1:
                    final[e] = float(scores[e])
        if options.limit and time.perf_counter() - begun > options.limit:
            print("stopped at the time limit")
            break
    entropy = _entropy(wave, valid)
    norms = {n: wave.params[n].detach().square().sum((-2, -1)).sqrt().mean(1).tolist() for n in ("wq", "wk")}
    return [
        {
            "arm": run.arm.name,
            "rate": run.rate,
            "seed": run.seed,
            "loss": final[e],
            "entropy": entropy[e],
            "norm_q": norms["wq"][e],
            "norm_k": norms["wk"][e],
            "settings": asdict(run.arm),
            "size": asdict(size),
            "log": logged[e],
        }
        for e, run in enumerate(runs)
    ]


def _starts(count: int, wave: Wave, seed: int) -> Tensor:
    """Start positions of the sequences of every step, [steps, B]; equal for all arms with the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(count - wave.size.length - 1, (wave.steps, wave.size.batch), generator=generator)


def _similarity(within: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and largest cosine between two heads of a layer, [E, L] each."""
    heads = within.shape[-1]
    off = ~torch.eye(heads, dtype=torch.bool, device=within.device)
    pairs = within[..., off]
    return pairs.mean(-1).cpu(), pairs.amax(-1).cpu()


@torch.no_grad()
def _evaluate(wave: Wave, valid: Tensor, batches: int) -> Tensor:
    """Mean loss in nats per byte on evenly spaced sequences of the validation text, [E]."""
    size = wave.size
    keep = torch.ones(len(wave.runs), size.layers, size.heads, device=wave.device)
    count = batches * size.batch
    starts = torch.linspace(0, len(valid) - size.length - 2, count, device=wave.device).long().view(batches, -1)
    reach = torch.arange(size.length + 1, device=wave.device)
    total = torch.zeros(len(wave.runs), device=wave.device, dtype=torch.float64)
    for batch in starts:
        tokens = valid[batch[:, None] + reach].long().expand(len(wave.runs), -1, -1)
        total += wave._losses(wave.params, tokens, keep)[0].double()
    return (total / batches).cpu()


@torch.no_grad()
def _entropy(wave: Wave, valid: Tensor) -> list[float]:
    """Mean entropy of attention in nats, with RoPE, on sampled positions of evenly spaced validation sequences."""
    size = wave.size
    reach = torch.arange(size.length + 1, device=wave.device)
    starts = torch.linspace(0, len(valid) - size.length - 2, size.batch, device=wave.device).long()
    tokens = valid[starts[:, None] + reach].long().expand(len(wave.runs), -1, -1)
    keep = torch.ones(len(wave.runs), size.layers, size.heads, device=wave.device)
    sampled = wave._losses(wave.params, tokens, keep)[1]  # [E, L, S, n, D]
    step = size.length // size.positions
    cos, sin = (t[::step][: size.positions] for t in (wave.cos, wave.sin))
    result = []
    for e in range(len(wave.runs)):
        x = sampled[e].float()  # [L, S, n, D]

        def heads(weight: Tensor, count: int) -> Tensor:
            projected = torch.einsum("lsnd,ldo->lsno", x, weight)  # noqa: B023
            return projected.unflatten(-1, (count, size.head)).transpose(2, 3)  # [L, S, M, n, d]

        q, k = heads(wave.params["wq"][e], size.heads), heads(wave.params["wk"][e], size.keys)
        if wave.runs[e].arm.norm:
            q, k = (torch.nn.functional.rms_norm(t, t.shape[-1:]) for t in (q, k))
        k = k.repeat_interleave(size.heads // size.keys, 2)
        turned = [torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))]
        logits = turned[0] @ turned[1].mT / math.sqrt(size.head)
        mask = torch.ones(size.positions, size.positions, dtype=torch.bool, device=x.device).tril()
        p = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        result.append(float(-(p * p.clamp(min=1e-12).log()).sum(-1).mean()))
    return result


def _bytes(folder: Path, part: str, limit: int) -> Tensor:
    for name in (f"{part}.en.xz", f"{part}.bin.xz"):
        if (folder / name).is_file():
            with lzma.open(folder / name) as file:
                data = file.read(limit) if part == "train" and limit else file.read()
            return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    raise SystemExit(f"{folder}: has no {part}.en.xz or {part}.bin.xz")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="size of the models")
    parser.add_argument(
        "--arms", default="decide", help=f"a set ({', '.join(SETS)}) or names of arms, separated by semicolons"
    )
    parser.add_argument("--rates", help="learning rates, separated by commas; default: those of the size")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=110, help="maximum number of models trained together")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--bytes", type=int, default=0, help="use only the first bytes of the training text")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file to append to")
    parser.add_argument("--eval-batches", type=int, default=16, help="batches of an evaluation")
    parser.add_argument("--evaluate-every", type=int, default=0, help="also log the validation loss this often")
    parser.add_argument("--limit", type=float, default=0, help="stop a wave after this many seconds")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tied", action="store_true", help="use the embedding as the output matrix, too")
    for name in ("steps", "batch", "heads", "width", "layers", "kv-heads"):
        parser.add_argument(f"--{name}", type=int, help="instead of the size's own")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Choose the launch of the LSTM's Triton kernels for many classifiers side by side on one GPU.

A program processes ROWS sentences, and reads all recurrent weights for every word. With more rows per program there are
fewer programs, so more processes run at the same time. `compile_rows` compares the results of a number of rows with
those of torch's modules, and `fastest_rows` measures the throughput of several streams.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from repulsive.lab.layers import lstm

CANDIDATES = (16, 32, 64)
RESULT = "lstm.json"
_TOLERANCE = 0.1  # relative error; that of bfloat16 gradients is a few percent, that of a wrong result about 1
_STREAMS, _REPEATS = 8, 3
_BATCH, _LENGTH = 256, 104


@dataclass(frozen=True)
class LstmTest:
    """A job that tests one number of rows, or measures those that passed.

    Args:
        folder: folder of its log and result.
        rows: number of rows to test; empty to measure nothing.
        is_timed: measure all of `rows` instead of comparing them with the modules.
        units: LSTM units in each direction.
    """

    folder: Path
    rows: tuple[int, ...]
    is_timed: bool = False
    units: int = 300


def check_lstm(job: LstmTest, file: TextIO) -> None:
    """Do the job and write its result: a relative error or milliseconds, by number of rows; null on failure."""
    result: dict[int, float | None] = {}
    before = lstm.ROWS
    torch.zeros(1, device="cuda")  # workers without rows to test only start CUDA
    for rows in job.rows:
        lstm.ROWS = rows
        try:
            result[rows] = _milliseconds(job.units) if job.is_timed else _error(job.units)
        except Exception:
            traceback.print_exc(file=file)
            result[rows] = None
    lstm.ROWS = before
    (job.folder / RESULT).write_text(json.dumps(result))


def passed(result: dict[str, float | None]) -> list[int]:
    """List the numbers of rows whose results agree with the modules."""
    return [int(rows) for rows, error in result.items() if error is not None and error <= _TOLERANCE]


def fastest_rows(result: dict[str, float | None]) -> int:
    """Return the number of rows with the highest throughput; the default without measurements."""
    times = {int(rows): value for rows, value in result.items() if value is not None}
    return min(times, key=lambda rows: times[rows]) if times else lstm.ROWS


def _inputs(units: int, batch: int, length: int) -> tuple[Tensor, Tensor, nn.LSTM, nn.LSTM]:
    torch.manual_seed(0)
    words = torch.randn(batch, length, units, device="cuda")
    ends = torch.randint(1, length + 1, (batch,), device="cuda")
    layers = [nn.LSTM(units, units, batch_first=True, device="cuda") for _ in range(2)]
    return words, ends, layers[0], layers[1]


def _error(units: int) -> float:
    """Return the largest relative error of states and gradients; also compiles the kernels for evaluation."""
    torch.backends.cudnn.allow_tf32 = True
    words, ends, ahead, back = _inputs(units, _BATCH, _LENGTH)
    results = []
    for compute, is_low in ((lstm.two_way, True), (lstm._by_modules, False)):
        with torch.autocast("cuda", torch.bfloat16, enabled=is_low):
            states = compute(words, ends, ahead, back)
        grads = torch.autograd.grad(states.float().square().sum(), [*ahead.parameters(), *back.parameters()])
        with torch.inference_mode():
            results.append([states.detach().float(), *grads, compute(words, ends, ahead, back)])
    return max(float((ours - exact).norm() / exact.norm()) for ours, exact in zip(*results, strict=True))


def _milliseconds(units: int) -> float:
    """Return the time of one batch, forward and backward, with several streams at the same time."""
    streams = [torch.cuda.Stream() for _ in range(_STREAMS)]
    inputs = [_inputs(units, _BATCH, _LENGTH) for _ in streams]
    torch.cuda.synchronize()
    started = 0.0
    for repeat in range(_REPEATS + 1):
        if repeat == 1:  # the first is the warm-up
            torch.cuda.synchronize()
            started = time.perf_counter()
        for stream, each in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16):
                lstm.two_way(*each).float().mean().backward()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / (_REPEATS * _STREAMS)

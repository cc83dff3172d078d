"""Time of the update alone on one GPU, against the floor of four passes over the parameters.

    python benchmarks/update_alone.py
"""

from __future__ import annotations

import os
import statistics
import time

import torch
from torch import nn

from repulsive import SPOS, SVGD, find_heads
from repulsive.repulsion import plan
from repulsive.repulsion.update import Update


def events(function, repeats: int = 50) -> float:
    """Median milliseconds on the device."""
    for _ in range(5):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graphed(function, repeats: int = 50) -> float:
    """Median milliseconds of a captured replay: launches cost nothing."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    return events(graph.replay, repeats) / 10


def host(function, repeats: int = 200) -> float:
    """Median milliseconds until the call returns to the host."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(512, 4, 6, 6, 1024, batch_first=True).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    groups = find_heads(model)
    size = sum(group.num_heads * group.dim for group in groups)
    big = torch.empty(2**28, device="cuda")
    other = torch.empty_like(big)
    rate = 2 * big.numel() * 4 / events(lambda: other.copy_(big), 10) / 1e9
    floor = 4 * size * 4 / rate / 1e9
    print(f"{len(groups)} groups, {size / 1e6:.1f}M numbers, copy {rate:.2f} TB/s, floor {floor:.4f} ms")
    flush = torch.empty(2**26, device="cuda")
    for splits in (8, 16, 32):
        plan.SPLITS = splits
        for rule in (SVGD(), SVGD(space="sphere"), SPOS()):
            update = Update(groups, 0)
            rates = {id(p): 1e-3 for p in model.parameters()} if isinstance(rule, SPOS) else {}
            run = lambda: update.run(rule, rates, step=1)  # noqa: B023, E731
            run()
            one = update._plans[0]
            parts = {
                "gram": lambda: one._gram("THETA"),  # noqa: B023
                "solve": lambda: one._solve(rule, 1),  # noqa: B023
                "combine": lambda: one._combine(None, noisy=isinstance(rule, SPOS)),  # noqa: B023
            }
            cold = []
            for _ in range(20):
                flush.normal_()
                cold.append(events_once(run))
            row = "  ".join(f"{name} {graphed(f):.4f}" for name, f in parts.items())
            print(f"splits {splits:2} {type(rule).__name__:5} {getattr(rule, 'space', ''):8} update {events(run):.4f} "
                  f"graph {graphed(run):.4f} cold {statistics.median(cold):.4f} host {host(run):.4f}  {row}")
    os.environ["REPULSIVE_KERNELS"] = "eager"
    update = Update(groups, 0)
    print(f"eager, stacked: {events(lambda: update.run(SVGD(), {}, step=1), 20):.3f} ms")


def events_once(function) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    main()

"""Weights of every layout, and one update of them with the Triton kernels or the eager reference."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from repulsive import SVGD
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if not GPU:
        monkeypatch.setattr(launch_settings, "SPLITS", 2)  # the interpreter runs programs one by one


class Weights(nn.Module):
    """Projections of every layout: packed head after head, interleaved, transposed, strided."""

    def __init__(self, heads: int, dim: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        out = heads * dim
        make = lambda *shape: nn.Parameter(torch.randn(*shape))  # noqa: E731
        self.strided, self.packed, self.interleaved = (make(n * out, columns) for n in (1, 3, 3))
        self.transposed = make(columns, 3 * out)
        self.to(DEVICE, dtype)
        count = torch.arange(3 * out)
        tables = {
            "strided": [count[:out].view(dim, heads).T.contiguous()],
            "packed": list(count.view(3, heads, dim)),
            "interleaved": list(count.view(heads, 3, dim).unbind(1)),
            "transposed": list(count.view(3, heads, dim)),
        }
        self.groups = []
        for name, rows in tables.items():
            for number, table in enumerate(rows):
                part = HeadSlice(self, name, name, table, axis=1 if name == "transposed" else 0)
                self.groups.append(HeadGroup(f"{name}.{number}", 0, "q", "encoder", "", "test", (part,)))
        # The interpreter runs groups one after another: one of each layout, and not the first of its weight.
        self.layouts = self.groups if GPU else [self.groups[index] for index in (0, 2, 6, 8)]
        joined = tuple(g.slices[0] for g in self.groups[1:4])
        self.joined = [HeadGroup("joined", 0, "qkv", "encoder", "", "test", joined)]


def gradients(model: Weights, seed: int = 1) -> None:
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=source).to(parameter)


def run(model, groups, rule, monkeypatch, choice, *, scale=None, step=3, measure=False):
    monkeypatch.setenv("REPULSIVE_KERNELS", choice)
    gradients(model)
    if scale is not None:
        for parameter in model.parameters():
            parameter.grad *= scale
    update = Update(groups, seed=7)
    rates = {id(p): 0.05 for p in model.parameters()}
    measured = update.run(StepInputs(rule, step, rates, scale=scale, measure=measure))
    found = {name: one.values(name) for one in measured for name in one.rows}
    assert (update._fused is not None) == (choice == "triton"), "the wrong path ran"
    assert update._eager_rest is None
    return [parameter.grad.float() for parameter in model.parameters()], found


def error(found, expected):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


RAMP = SVGD(alpha=lambda step: 0.1 * step)

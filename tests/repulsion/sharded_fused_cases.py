"""Sharded weights of every layout, and updates of them by the Triton kernels and by the reference, for the tests."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, CosineLadder
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import KernelFree
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.repulsion.sharded_probes import Wire

HEADS = 4
RULES = {
    "svgd": SVGD(alpha=1.0),
    "sphere auto": SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=0),
    "smoothed auto": SVGD(alpha="auto", ratio=0.3),
    "spos without noise": SPOS(0.1, 1.0, 10.0, temperature=0),
    "spos": SPOS(0.1, 1.0, 10.0),
    "sgld": SGLD(0.1, 0.5),
    "kernel-free": KernelFree(alpha=1.0),
    "ladder": CosineLadder(alpha=1.0),  # a rule without a built-in form
    "released": SPOS(0.1, 1.0, 10.0, noise="released"),  # needs whole heads, so it stays eager
}


@dataclass(frozen=True)
class Weight:
    """One weight with `parts` projections of `heads` heads, and the dimension that is sharded; None for copies.

    Stacked weights [heads, rows, columns] hold a head in each matrix; transposed ones have output features last.
    """

    columns: int
    shard: int | None
    heads: int = HEADS
    rows: int = 2  # output features per head
    parts: int = 1
    unused: int = 0  # further projections that no group contains
    kind: str = "plain"  # or "interleaved", "transposed", "stacked"

    @property
    def shape(self) -> tuple[int, ...]:
        features = (self.parts + self.unused) * self.heads * self.rows
        if self.kind == "stacked":
            return self.heads, self.rows, self.columns
        return (self.columns, features) if self.kind == "transposed" else (features, self.columns)

    def tables(self) -> list[torch.Tensor]:
        """Rows of the heads of each projection."""
        if self.kind == "stacked":
            return [torch.arange(self.heads).view(-1, 1)]
        parts = self.parts + self.unused
        count = torch.arange(parts * self.heads * self.rows)
        if self.kind == "interleaved":
            tables = list(count.view(self.heads, parts, self.rows).unbind(1))
        else:
            tables = list(count.view(parts, self.heads, self.rows))
        return tables[: self.parts]


COLUMNS = {
    "even": Weight(10, 1),
    "uneven": Weight(7, 1, parts=3),
    "one column": Weight(1, 1),  # none on the second of two ranks
    "interleaved": Weight(5, 1, parts=2, kind="interleaved"),
    "transposed": Weight(5, 0, parts=2, kind="transposed"),
    "one transposed column": Weight(1, 0, kind="transposed"),
    "stacked by rows": Weight(4, 1, rows=3, kind="stacked"),
    "stacked by columns": Weight(5, 2, rows=3, kind="stacked"),
}
OTHER_HEADS = {"three heads": Weight(7, 1, heads=3)}
ROWS = {
    "even rows": Weight(6, 0),
    "uneven rows": Weight(5, 0, rows=3, heads=3, parts=2, unused=1),
    "rows of one column": Weight(1, 0),
    "transposed rows": Weight(5, 1, parts=2, kind="transposed"),
    "stacked matrices": Weight(5, 0, rows=3, kind="stacked"),
}
FEW = {"uneven": Weight(7, 1), "one column": Weight(1, 1), "three heads": Weight(3, 1, heads=3)}
WEIGHTS = {
    "few": FEW,
    "few and rows": FEW | {"uneven rows": Weight(5, 0, heads=3, rows=1)},
    "columns": COLUMNS | OTHER_HEADS,
    "rows": ROWS,
    "everything": COLUMNS | OTHER_HEADS | ROWS | {"copies": Weight(5, None)},
}


class Model(nn.Module):
    """The weights of a set, and groups of their heads; with a mesh, sharded over it.

    Args:
        weights: the weights by name.
        mesh: the mesh, or None for whole weights.
        dtype: dtype of weights and gradients.
        device: device of whole weights.
        joined: join the weights with the same number of heads to one group, as q, k and v of one particle.
    """

    def __init__(self, weights, mesh=None, dtype=torch.float64, device="cpu", joined=False):
        super().__init__()
        self.weights, self.mesh, self.dtype, self.device = weights, mesh, dtype, device
        source = torch.Generator().manual_seed(0)
        self.groups = []
        for name, weight in weights.items():
            whole = torch.randn(weight.shape, generator=source, dtype=torch.float32)
            setattr(self, name, nn.Parameter(self.place(whole, weight)))
            axis = 1 if weight.kind == "transposed" else 0
            for number, table in enumerate(weight.tables()):
                part = HeadSlice(self, name, name, table, axis)
                self.groups.append(HeadGroup(f"{name}.{number}", 0, "q", "encoder", "", "test", (part,)))
        if joined:
            slices = [group.slices[0] for group in self.groups if group.num_heads == HEADS]
            self.groups = [HeadGroup("joined", 0, "qkv", "encoder", "", "test", tuple(slices))]

    def place(self, whole, weight):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        whole = whole.to(self.device, self.dtype)
        if self.mesh is None:
            return whole
        placement = Replicate() if weight.shard is None else Shard(weight.shard)
        return distribute_tensor(whole, self.mesh, [placement] * self.mesh.ndim)

    def set_gradients(self, seed, scale=None):
        source = torch.Generator().manual_seed(seed)
        for name, weight in self.weights.items():
            whole = torch.randn(weight.shape, generator=source, dtype=torch.float32)
            grad = self.place(whole if scale is None else whole * scale.cpu(), weight)
            parameter = getattr(self, name)
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.copy_(grad)  # the same memory in every step

    def gradients(self):
        grads = {name: getattr(self, name).grad for name in self.weights}
        return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in grads.items()}


@dataclass(frozen=True)
class Step:
    """Result of one step: gradients by weight, measurements by group, and collective calls with their bytes."""

    gradients: dict[str, torch.Tensor]
    measured: dict[str, dict[str, float]]
    calls: list[tuple[str, int]]


def steps(model, rule, backend, *, count=3, scale=None, update=None):
    """Run some steps with new gradients each; the first two are measured."""
    os.environ["REPULSIVE_KERNELS"] = backend
    update = Update(model.groups, seed=7) if update is None else update
    rates = {id(parameter): 0.05 for parameter in model.parameters()}
    results = []
    for step in range(count):
        model.set_gradients(step, scale)
        with Wire() as wire:
            measured = update.run(StepInputs(rule, step, rates, scale, measure=step < 2))
        gradients = {name: grad.cpu() for name, grad in model.gradients().items()}
        values = {name: one.values(name) for one in measured for name in one.rows}
        results.append(Step(gradients, values, wire.sent))
    return results


def largest_error(results, expected):
    """Largest relative error of the gradient of one weight in one step."""
    return max(
        float((step.gradients[name].double() - grad).norm() / grad.norm())
        for step, wanted in zip(results, expected, strict=True)
        for name, grad in wanted.gradients.items()
    )

"""The code that each rank runs for `test_sharded_fused`: updates of sharded weights by interpreted Triton kernels."""

import os
from functools import partial

import torch
from torch import nn

from repulsive.repulsion.backends import eager, launch_settings
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.interpreter import remember_builtins
from tests.repulsion import sharded_cases
from tests.repulsion.sharded_fused_cases import RULES, WEIGHTS, Model, Step, steps
from tests.repulsion.sharded_probes import guarded

QUICK_RULES = ("sphere auto", "spos")
SMALL_BATCH = 200  # bytes: moves most weights in batches of their own


def sharded(world, weights="everything", rule="svgd", *, dtype=torch.float32, joined=False, scale=None, more=()):
    """Steps on sharded weights, and the backends that ran."""
    from torch.distributed.tensor import init_device_mesh

    model = Model(WEIGHTS[weights], init_device_mesh("cpu", (world, *more)), dtype, joined=joined)
    update = Update(model.groups, seed=7)
    results = steps(model, RULES[rule], "triton", scale=scale, update=update)
    sizes = [len(update._fused), len(update._sharded.groups), update._eager_rest is not None]
    return {"steps": results, "used": sizes, "eager": update._eager_sharded is not None}


def in_small_batches(world):
    held, eager.MAX_MOVED = eager.MAX_MOVED, SMALL_BATCH
    try:
        return sharded(world, "rows")
    finally:
        eager.MAX_MOVED = held


def eager_in_uneven_batches(world):
    """The batches of the eager update when ranks hold different numbers of rows; all groups fit on one rank only."""
    from torch.distributed.tensor import init_device_mesh

    weights = dict.fromkeys("ab", WEIGHTS["rows"]["uneven rows"])
    model = Model(weights, init_device_mesh("cpu", (world,)), torch.float32)
    own = [2 * getattr(model, name).to_local().numel() * 4 for name in "ab"]
    held, eager.MAX_MOVED = eager.MAX_MOVED, len(model.groups) * 2 * 13 * 5 * 4  # 13 or 14 rows
    try:
        return {"own": sum(own), "steps": steps(model, RULES["svgd"], "eager", count=1)}
    finally:
        eager.MAX_MOVED = held


def different_strides(world):
    """One rank has gradients with other strides; ranks must still choose the same backend."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    model = Model({"even": WEIGHTS["columns"]["even"]}, mesh, torch.float32)
    os.environ["REPULSIVE_KERNELS"] = "triton"
    model.set_gradients(0)
    grad = model.even.grad.to_local()
    if mesh.get_local_rank() == 0:
        grad = grad.T.contiguous().T
    whole = model.even
    known = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    model.even.grad = DTensor.from_local(grad, mesh, [Shard(1)], **known)
    update = Update(model.groups, seed=7)
    update.run(StepInputs(RULES["svgd"], 0))
    return {"steps": [Step(model.gradients(), {}, [])], "strides": grad.stride()}


def changed_placement(world):
    """A weight that is sharded by columns in the first step and by rows in the second."""
    from torch.distributed.tensor import Shard, init_device_mesh

    model = Model({"even": WEIGHTS["columns"]["even"]}, init_device_mesh("cpu", (world,)), torch.float32)
    os.environ["REPULSIVE_KERNELS"] = "triton"
    update = Update(model.groups, seed=7)
    results = []
    for step in range(2):
        model.set_gradients(step)
        if step == 1:
            grad = model.even.grad.redistribute(placements=[Shard(0)])
            model.even = nn.Parameter(model.even.detach().redistribute(placements=[Shard(0)]))
            model.even.grad = grad
        update.run(StepInputs(RULES["svgd"], step))
        results.append(Step(model.gradients(), {}, []))
    return results


def trained(world, columns, rule, count=3):
    """Train a model under FSDP2 with `repel`, in float32."""
    os.environ["REPULSIVE_KERNELS"] = "triton"
    case = sharded_cases.Case(columns=columns, rule=rule)
    model, x, y = sharded_cases.make(case, torch.float32)
    rank, size = case.place(model, world)
    optimizer = sharded_cases.optimizer_of(case, model)
    handle = sharded_cases.attach(case, model, optimizer, measure_every=2)
    sharded_cases.train(case, model, optimizer, x.chunk(size)[rank], y.chunk(size)[rank], steps=count)
    is_fused = handle._updates.current._sharded is not None and handle._updates.current._eager_rest is None
    return sharded_cases.found(model, handle) | {"fused": is_fused}


def collect(cases, rank, folder, world):
    """Run cases, name -> function, and save what they return."""
    launch_settings.SPLITS = 1  # the interpreter runs programs one by one
    remember_builtins()
    torch.save({name: guarded(case, world) for name, case in cases.items()}, f"{folder}/{rank}.pt")


QUICK = {("rule", rule): partial(sharded, weights="few and rows", rule=rule) for rule in QUICK_RULES}
QUICK["strides"] = different_strides
SLOW = {("rule", rule): partial(sharded, weights="few and rows", rule=rule) for rule in RULES}
SLOW |= {("all", rule): partial(sharded, rule=rule) for rule in ("sphere auto", "spos")}
SLOW |= {
    "columns": partial(sharded, weights="columns", rule="smoothed auto"),
    "rows": partial(sharded, weights="rows", rule="smoothed auto"),
    "unmixed rows": partial(sharded, weights="rows", rule="sphere auto"),
    "joined": partial(sharded, rule="spos", joined=True),
    "half": partial(sharded, weights="few", dtype=torch.bfloat16),
    "scaled": partial(sharded, weights="everything", rule="sphere auto", scale=torch.tensor(64.0)),
    "two dimensions": partial(sharded, weights="few", rule="spos", more=(1,)),
    "batches": in_small_batches,
    "uneven batches": eager_in_uneven_batches,
    "placement": changed_placement,
}
SLOW |= {
    ("trained", columns, rule): partial(trained, columns=columns, rule=rule)
    for columns in (True, False)
    for rule in ("auto", "spos")
}


def run_quick(rank, folder, world):
    collect(QUICK, rank, folder, world)


def run_slow(rank, folder, world):
    collect(SLOW, rank, folder, world)

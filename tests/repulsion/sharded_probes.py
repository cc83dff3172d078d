"""The code that each rank runs for `test_sharded`: training runs of its world size, and detailed checks."""

import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from repulsive import HeadLayoutError, UnsupportedWeights, repel
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.repulsion import head_placement
from repulsive.repulsion.backends import eager
from tests.repulsion import sharded_cases
from tests.repulsion.sharded_cases import WORLDS, Separate, attach, groups_of, make, optimizer_of, together, train

HALF = ("rows, spos", "columns, spos")
RULE = sharded_cases.RULES["spos"]
SAVED = sharded_cases.CASES["columns, spos"]


class Wire(TorchDispatchMode):
    """Record every collective call with the number of bytes it was given."""

    KINDS = ("allreduce", "all_reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "send", "recv")

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        distributed = func.namespace in ("c10d", "_c10d_functional", "_dtensor")
        if distributed and any(kind in func.__name__ for kind in self.KINDS):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.sent.append((func.__name__.split(".")[0], sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


def wire(case, world):
    """Collectives of the second `apply`; the first one also looks up placements."""
    model, x, y = make(case)
    case.place(model, world)
    handle = attach(case, model, optimizer_of(case, model), measure_every=50)
    nn.functional.cross_entropy(model(x), y).backward()
    handle.apply()
    handle.steps = 1  # step 0 is measured, and sends the products of the gradients too
    with Wire() as seen:
        handle.apply()
    return seen.sent


def placements(world):
    """Placements of (weight, gradient) that `fully_shard` does not create, by name."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if world == 2:
        return {
            "partial gradient": ([Shard(0)], [Partial()]),
            "gradient elsewhere": ([Shard(1)], [Shard(0)]),
            "copies, partial gradient": ([Replicate()], [Partial()]),
            "uneven columns": ([Shard(1)], [Shard(1)]),
        }
    return {
        "rows twice": ([Shard(0), Shard(0)], [Shard(0), Shard(0)]),
        "rows then columns": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
        "columns then rows": ([Shard(1), Shard(0)], [Shard(1), Shard(0)]),
        "columns twice": ([Shard(1), Shard(1)], [Partial(), Shard(0)]),
    }


def one_step(lies, grad_lies, world, axis):
    """The largest difference to the same step on plain tensors, with noise and a measurement, and the two ratios."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,) if world == 2 else (2, 2))
    torch.manual_seed(0)
    shape = (8, 7) if axis == 0 else (7, 8)
    weight, grad = torch.randn(2, *shape, dtype=torch.float64)
    results = []
    for spread in (False, True):
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(weight, mesh, lies) if spread else weight.clone())
        rows = torch.arange(8).view(4, 2).flip(0)  # no fixed stride
        part = HeadSlice(module, "weight", "weight", rows, axis)
        group = HeadGroup("q", 0, "q", "encoder", "", "by hand", (part,))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        handle = repel(module, optimizer, RULE, groups=[group], verbose=False)
        module.weight.grad = distributed(grad, mesh, grad_lies) if spread else grad.clone()
        optimizer.step()
        results.append((module.weight.full_tensor() if spread else module.weight, handle.report()[0].ratio))
    (plain, ratio), (sharded, same_ratio) = results
    return {"error": float((plain - sharded).abs().max()), "ratios": (ratio, same_ratio)}


def distributed(grad, mesh, lies):
    """Distribute `grad` with any placements; partial sums have unequal parts."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    spread = distribute_tensor(grad, mesh, [Replicate() if p.is_partial() else p for p in lies])
    local = spread.to_local()
    for dim, placement in enumerate(lies):
        if isinstance(placement, Partial):
            local = local * (0.25 if mesh.get_local_rank(dim) == 0 else 0.75)
    return DTensor.from_local(local, mesh, lies, run_check=False, shape=grad.shape, stride=grad.stride())


def mixed(world):
    """One group of a sharded and a plain weight: products of the plain one must be counted once."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    values = torch.randn(4, 8, 8, dtype=torch.float64)
    results = []
    for spread in (False, True):
        module = nn.Module()
        for name, value, grad in (("a", values[0], values[2]), ("b", values[1], values[3])):
            sharded = spread and name == "a"
            place = (lambda t: distribute_tensor(t, mesh, [Shard(1)])) if sharded else torch.clone
            parameter = nn.Parameter(place(value))
            parameter.grad = place(grad)
            setattr(module, name, parameter)
        rows = torch.arange(8).view(4, 2)
        slices = tuple(HeadSlice(module, name, name, rows) for name in "ab")
        group = HeadGroup("qk", 0, "qk", "encoder", "", "by hand", slices)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        repel(module, optimizer, RULE, groups=[group], verbose=False).apply()
        results.append(module.b.grad)
    return float((results[0] - results[1]).abs().max())


def refusals(world):
    """The message of each error that sharding can raise, by name."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    def partial_weight():
        model = Separate()
        mesh = init_device_mesh("cpu", (world,))
        weight = DTensor.from_local(model.layers[0].q.weight.detach(), mesh, [Partial()])
        model.layers[0].q.weight = nn.Parameter(weight)
        repel(model, torch.optim.SGD(model.parameters(), lr=0.1), groups=groups_of(model), verbose=False)

    def odd_columns():
        model = Separate(3, 3)
        head_placement(model, groups=groups_of(model))

    def left_gathered():
        model = Separate()
        for module in (*model.layers, model):
            fully_shard(module)
            module.set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        repel(model, optimizer, groups=groups_of(model), verbose=False)
        model(torch.randn(2, 3, 16)).sum().backward()
        optimizer.step()

    def flattened():
        model = FullyShardedDataParallel(sharded_cases.packed(), device_id=torch.device("cpu"))
        repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)

    def flattened_in_place():
        """Each weight stays a parameter with one dimension: its pieces must not be taken for heads."""
        whole = FullyShardedDataParallel(sharded_cases.packed(), use_orig_params=True, device_id=torch.device("cpu"))
        repel(whole, torch.optim.SGD(whole.parameters(), lr=0.1), verbose=False)

    def flattened_later():
        model = sharded_cases.packed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        repel(model, optimizer, verbose=False)
        whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        whole(torch.randn(2, 3, 16)).sum().backward()
        optimizer.step()

    texts = {}
    for function in (partial_weight, odd_columns, left_gathered, flattened, flattened_in_place, flattened_later):
        try:
            function()
            texts[function.__name__] = "nothing was raised"
        except UnsupportedWeights as error:
            texts[function.__name__] = str(error)
    return texts


class LongBatches(nn.Module):
    """Two attention layers, the second of which only runs on more than two samples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        for layer in self.layers if len(x) > 2 else self.layers[:1]:
            x = layer(x, x, x)[0]
        return x


def traced(world):
    """The number of heads that each rank proves with an example of its own, or the error.

    Rank 0 runs its two samples once and misses a layer; the others run two of their four samples, then all.
    """
    model = LongBatches()
    sharded_cases.shard(model)
    example = torch.randn(4 if dist.get_rank() else 2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 does not reach one layer
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = repel(model, optimizer, RULE, example_inputs=example, verbose=False)
        except HeadLayoutError as error:
            return str(error)
    return [group.proof for group in handle.groups]


def checkpoint(world, folder, resume):
    """Train four steps, save a checkpoint, train four more; or resume from it and train the last four."""
    import torch.distributed.checkpoint as dcp

    model, x, y = make(SAVED)
    rank, size = SAVED.place(model, world)
    optimizer = optimizer_of(SAVED, model)
    handle = attach(SAVED, model, optimizer, seed=9 if resume else 4)  # the seed comes from the checkpoint
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    else:
        train(SAVED, model, optimizer, x.chunk(size)[rank], y.chunk(size)[rank], steps=4)
    state = {"model": model.state_dict(), "repulsive": handle}
    (dcp.load if resume else dcp.save)(state, checkpoint_id=f"{folder}/checkpoint")
    steps = handle.steps
    train(SAVED, model, optimizer, x.chunk(size)[rank], y.chunk(size)[rank], steps=4)
    return {"weights": sharded_cases.whole(model), "at": steps, "seed": handle.settings.seed}


def in_bunches(case, world):
    """A run that moves as little as possible from other ranks at a time."""
    held, eager.MAX_MOVED = eager.MAX_MOVED, 1
    try:
        return together(case, world) | {"wire": wire(case, world)}
    finally:
        eager.MAX_MOVED = held


def guarded(function, *args):
    """The result of a function, or its traceback: one failing case must not hide the others."""
    try:
        return function(*args)
    except Exception:
        return {"failed": traceback.format_exc()}


def run_all(rank, folder, world):
    cases = WORLDS[world]
    found = {name: guarded(together, case, world) for name, case in cases.items()}
    found["wire"] = {name: guarded(wire, cases[name], world) for name in HALF}
    found["half"] = {name: guarded(together, cases[name], world, torch.bfloat16) for name in HALF}
    found["placed"] = {
        (name, axis): guarded(one_step, *pair, world, axis)
        for name, pair in placements(world).items()
        for axis in (0, 1)
    }
    found["mixed"] = guarded(mixed, world)
    if world == 2:
        found["checkpoint"] = guarded(checkpoint, world, folder, False)
        found["bunches"] = guarded(in_bunches, cases["rows, spos"], world)
        found["refusals"] = guarded(refusals, world)
        found["traced"] = guarded(traced, world)
    torch.save(found, f"{folder}/{world}-{rank}.pt")


def resume(rank, folder, world):
    torch.save(guarded(checkpoint, world, folder, True), f"{folder}/resumed-{rank}.pt")

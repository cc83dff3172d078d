"""Small attention models, ways to shard them, and one training run of each, for `test_sharded`."""

import warnings
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn

from repulsive import SPOS, SVGD, repel
from repulsive.heads import find_heads, heads_by_hand
from repulsive.heads.select import select
from repulsive.repulsion import head_placement
from tests.repulsion.conftest import Encoder

STEPS = 9
RULES = {
    "svgd": SVGD(alpha=0.5),
    "spos": SPOS(0.1, 0.5, 100.0),
    "auto": SVGD(alpha="auto", ratio=0.3, space="sphere"),
    "recommended": SVGD("heads", alpha="auto", ratio=0.3, space="sphere", smoothing=0, act_every=4),
    "released": SPOS(0.1, 0.5, 100.0, noise="released"),
    "callable": SVGD(alpha=0.5, kernel=lambda x, y: torch.exp(-(x - y).square().sum(-1))),
}


class Attention(nn.Module):
    """Separate projections. The number of heads follows from the local weights, so heads can be split over ranks."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.mT / self.head**0.5, -1) @ v  # [B, M, T, head]
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Separate(nn.Module):
    """Two attention layers over `heads` heads."""

    def __init__(self, heads: int = 4, head: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, heads * head
        self.layers = nn.ModuleList(Attention(self.width, head) for _ in range(2))
        self.out = nn.Linear(self.width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


def packed():
    model = Encoder()
    model.width = 16
    return model


def groups_of(model, particle="projection"):
    if isinstance(model, Encoder):
        return find_heads(model, particle=particle)
    names = {f"layers.{i}.{part}": (part, model.heads) for i in range(2) for part in "qkv"}
    return select(heads_by_hand(model, names), particle=particle)


def layers_of(model):
    return model.stack.layers if isinstance(model, Encoder) else model.layers


def shard(model, mesh=None, columns=False):
    from torch.distributed.fsdp import fully_shard

    placement = head_placement(model, mesh=mesh, groups=groups_of(model)) if columns else None
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement)


def split_heads(model, mesh):
    """Tensor parallel: q, k, v by heads, o by columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {part: ColwiseParallel() for part in "qkv"} | {"o": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


@dataclass(frozen=True)
class Case:
    """One way to shard one model: `tensor` ranks split heads, `replicas` hold copies, FSDP uses the others."""

    build: object = Separate
    columns: bool = False
    fsdp: bool = True
    tensor: int = 1
    replicas: int = 1
    rule: str = "svgd"
    particle: str = "projection"
    options: tuple = ()
    scaled: bool = False  # fused Adam under a gradient scaler, one step of which overflows on one rank

    def place(self, model, world):
        """Shard `model` and return (rank in the data dimension, size of it)."""
        from torch.distributed.tensor import init_device_mesh

        data = world // self.tensor
        sizes = {"replica": self.replicas, "shard": data // self.replicas, "tensor": self.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1}
        mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
        if self.tensor > 1:
            split_heads(model, mesh["tensor"])
        if self.fsdp:
            names = tuple(name for name in kept if name != "tensor")
            shard(model, mesh[names] if len(names) > 1 else mesh[names[0]], self.columns)
        return dist.get_rank() // self.tensor, data


CASES = {
    "rows": Case(),
    "rows, spos": Case(rule="spos", particle="head"),
    "columns": Case(columns=True, particle="head"),
    "columns, spos": Case(columns=True, rule="spos"),
    "packed rows, spos": Case(packed, rule="spos"),
    "packed columns, auto": Case(packed, columns=True, rule="auto", particle="head"),
    "uneven rows, spos": Case(lambda: Separate(3, 2), rule="spos"),
    "rows, noise in parameters": Case(rule="spos", options=(("noise_in", "parameter"),)),
    "columns, noise in parameters": Case(columns=True, rule="spos", options=(("noise_in", "parameter"),)),
    "rows, noise in optimizer": Case(rule="spos", options=(("noise_in", "optimizer"),), scaled=True),
    "columns, noise in optimizer": Case(columns=True, rule="spos", options=(("noise_in", "optimizer"),)),
    "columns, clipped": Case(columns=True, options=(("max_norm", 0.05),)),
    "columns, scaled": Case(columns=True, rule="spos", scaled=True),
    "columns, released noise": Case(columns=True, rule="released"),
    "rows, recommended and clipped": Case(rule="recommended", options=(("max_norm", 0.05),)),
    "columns, recommended": Case(columns=True, rule="recommended"),
    "rows, callable kernel": Case(rule="callable", particle="head"),
    "tensor parallel": Case(fsdp=False, tensor=2, particle="head"),
    "tensor parallel, spos": Case(fsdp=False, tensor=2, rule="spos"),
}
ON_FOUR = {
    "rows, spos": CASES["rows, spos"],
    "columns, spos": CASES["columns, spos"],
    "packed rows, scaled": Case(packed, scaled=True),
    "uneven rows, spos": CASES["uneven rows, spos"],
    "copies of rows, spos": Case(replicas=2, rule="spos"),
    "copies of columns": Case(replicas=2, columns=True, particle="head"),
    "rows and heads, spos": Case(tensor=2, rule="spos", particle="head"),
    "columns and heads, spos": Case(tensor=2, columns=True, rule="spos"),
}
WORLDS = {2: CASES, 4: ON_FOUR}


def make(case, dtype=torch.float64):
    torch.manual_seed(0)
    model = case.build().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(8, 5, model.width, dtype=torch.float64)
    return model.to(dtype), x.to(dtype), torch.randint(3, (8,))


def attach(case, model, optimizer, **options):
    groups = groups_of(model, case.particle)
    fixed = {"groups": groups, "seed": 4, "measure_every": 7, "noise_in": "gradient", "verbose": False}
    options = {**fixed, **dict(case.options), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as groups that are left out
        warnings.filterwarnings("ignore", "heads get about")  # SGD on purpose: it shows errors that Adam would hide
        return repel(model, optimizer, RULES[case.rule], **options)


def optimizer_of(case, model):
    if case.scaled:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(case, model, optimizer, x, y, steps=STEPS, first_rank=True):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaled)
    for index in range(steps):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if case.scaled and index == 2 and first_rank:
            grad = model.out.weight.grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()


def whole(model):
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}


def found(model, handle):
    heads = [group.read().double().norm() for group in handle.groups]
    report = [asdict(line) for line in handle.report()]
    return {"weights": whole(model), "report": report, "heads": torch.stack(heads), "steps": handle.steps}


def alone(case):
    """Train in one process."""
    model, x, y = make(case)
    optimizer = optimizer_of(case, model)
    handle = attach(case, model, optimizer)
    train(case, model, optimizer, x, y)
    return found(model, handle)


def together(case, world, dtype=torch.float64):
    """Train on all ranks, each with its part of the batch."""
    model, x, y = make(case, dtype)
    rank, size = case.place(model, world)
    torch.manual_seed(rank)  # torch's random state differs between ranks; counter-based noise must not
    optimizer = optimizer_of(case, model)
    handle = attach(case, model, optimizer)
    train(case, model, optimizer, x.chunk(size)[rank], y.chunk(size)[rank], first_rank=dist.get_rank() == 0)
    return found(model, handle)

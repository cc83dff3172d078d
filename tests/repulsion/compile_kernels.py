"""Compile the launches of updates for an NVIDIA H100 or H200 ahead of time, without a GPU.

Run as a module, without TRITON_INTERPRET; prints one line per compiled launch: its name, its size in bytes, and its
number of instructions that load or store 16 bytes. The interpreter accepts code that the compiler refuses.
"""

import inspect
import os
import re

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from repulsive import SGLD, SPOS, SVGD, group_modules
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import KernelFree
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.fused import FusedUpdate
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.local_update import LocalUpdate, Reduction
from repulsive.repulsion.backends.triton_kernels import (
    column_combine,
    column_gram,
    combine,
    gram,
    pack,
    solve,
    step_noise,
)

IS_OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3)  # constants of a launch are given by name
TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages")
WIDE = re.compile(r"(?:ld|st)\.global\.v4\.b32|cp\.async\.cg")
RULES = [
    SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0),
    SVGD(alpha="auto", kernel="imq", bandwidth="released"),
    SVGD(bandwidth="released-lower"),
    SVGD(alpha="auto", kernel="cosine"),
    SVGD(alpha="auto", kernel="hinge", space="sphere"),
    SPOS(bandwidth=2.0),
    KernelFree(alpha="auto"),
    SGLD(),
]


class Compiled:
    """Stands in for a Triton kernel: a launch compiles it, unless it was compiled for the same constants before."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.done: set[str] = set()

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **constants):
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        names = list(inspect.signature(self.kernel.fn).parameters)
        types = ["i32" if isinstance(value, int) else TYPES[value.dtype] for value in args]
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        key = repr((signature, constants, options))
        if key not in self.done:
            self.done.add(key)
            if IS_OLD:
                signature, values = {name: signature[name] for name in signature if name not in constants}, constants
            else:
                values = {(names.index(name),): value for name, value in constants.items()}
            code = compile(ASTSource(self.kernel, signature, values), target=TARGET, options=options).asm
            wide = len(WIDE.findall(code["ptx"]))
            print(self.kernel.__name__, len(code["cubin"]), wide, flush=True)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1"
    for module in (gram, column_gram, solve, combine, column_combine, pack, step_noise):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiled(getattr(module, name)))
    for heads, rules in ((1, RULES[:1]), (4, RULES), (12, RULES[:2]), (64, RULES[:1])):
        layer = nn.Linear(8, 2 * heads, bias=False)
        compile_updates(layer, torch.arange(2 * heads).view(heads, 2), 0, rules)
    for heads in (4, 12):
        compile_step_noise(heads)
    launch_settings.PRECISION[16] = "tf32x3"
    layer = nn.Linear(8, 24, bias=False)
    compile_updates(layer, torch.arange(24).view(12, 2), 0, RULES[2:3])
    launch_settings.PRECISION[16] = "split"
    for modules in (4, 12):  # heads in separate modules
        compile_modules(modules)
    if launch_settings.has_tuples():
        compile_columns()
    for heads in (4, 12):  # heads side by side in rows, as in GPT-2; these launches are printed last
        layer = nn.Linear(32 * heads, 8, bias=False)
        compile_updates(layer, torch.arange(32 * heads).view(heads, 32), 1, RULES[:1])


def compile_updates(layer: nn.Linear, rows: torch.Tensor, axis: int, rules: list) -> None:
    layer.weight.grad = torch.zeros_like(layer.weight)
    part = HeadSlice(layer, "weight", "weight", rows, axis=axis)
    groups = [HeadGroup("heads", 0, "q", "encoder", "", "test", (part,))]
    update, local = FusedUpdate(groups, seed=0), LocalUpdate(groups, 0, [(8, 16, 0, 32)], [True])
    reduction = Reduction((), [local])
    assert update.refresh() and local.refresh()
    for rule in rules:
        for measure in (False, True):
            scale = torch.tensor(2.0) if measure else None
            rates = {id(layer.weight): 0.1}
            if axis == 0:
                inputs = StepInputs(rule, 0, rates, scale, measure)
                local.prepare(rule, inputs)
                reduction.sum_products()
                local.finish()
            update.run(rule, rates, step=0, scale=scale, measure=measure)


def compile_step_noise(heads: int) -> None:
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
    ):
        layer = nn.Linear(16, 4 * heads, bias=False)
        optimizer = kind(layer.parameters(), lr=0.1, **options)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        part = HeadSlice(layer, "weight", "weight", torch.arange(4 * heads).view(heads, 4))
        update = FusedUpdate([HeadGroup("heads", 0, "q", "encoder", "", "test", (part,))], seed=0)
        assert update.refresh() and update.add_step_noise(SGLD(), optimizer, step=0)


def compile_columns() -> None:
    """Compile the launches that keep columns in registers."""
    assert launch_settings.column_settings("gram", 12)
    compile_modules(12)
    for axis, layer in enumerate((nn.Linear(8, 384, bias=False), nn.Linear(384, 8, bias=False))):
        compile_updates(layer, torch.arange(384).view(12, 32), axis, [RULES[0], RULES[5]])


def compile_modules(count: int) -> None:
    modules = [nn.Linear(16, 4, bias=False) for _ in range(count)]
    for module in modules:
        module.weight.grad = torch.zeros_like(module.weight)
    update = FusedUpdate(group_modules(modules), seed=0)
    assert update.refresh()
    rates = {id(module.weight): 0.1 for module in modules}
    for rule in (RULES[0], RULES[5]):
        for measure in (False, True):
            update.run(rule, rates, step=0, measure=measure)


if __name__ == "__main__":
    main()

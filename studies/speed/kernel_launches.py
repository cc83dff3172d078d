"""Attention weights of known models, and the launches of their fused update one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadGroup, HeadSlice, consecutive_rows
from repulsive.particles import SPOS, rule_by_name
from repulsive.particles.named import NOISE_IN_GRADIENT
from repulsive.repulsion.backends.fused import FusedUpdate
from repulsive.repulsion.backends.variants import Combination, Variant

RULES = ("paper", "spos-paper", "recommended")
FLUSH = 200 * 2**20  # bytes that are written before each repetition, several times the L2 cache
SLEEP = 1_500_000  # cycles that the GPU waits before each repetition, while the host launches it
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's attention.

    Args:
        layers: number of layers.
        width: width of the model.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        dim: features of a head.
        packed: whether q, k and v are one weight [width, 3 width], as in GPT-2's Conv1D.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int = 64
    packed: bool = False

    def groups(self, device: torch.device, layers: int | None = None) -> list[HeadGroup]:
        """Make random weights and gradients, and group their heads."""
        source = torch.Generator(device).manual_seed(0)
        return [group for layer in range(layers or self.layers) for group in self._layer(layer, device, source)]

    def _layer(self, layer: int, device: torch.device, source: torch.Generator) -> list[HeadGroup]:
        groups, features = [], 0
        counts = (self.heads, self.kv_heads, self.kv_heads)
        module = _module((self.width, sum(counts) * self.dim), device, source) if self.packed else None
        for part, heads in zip("qkv", counts, strict=True):
            rows = consecutive_rows(heads, self.dim)
            if module is not None:
                own = HeadSlice(module, "weight", "weight", features + rows, axis=1)
            else:
                own = HeadSlice(_module((heads * self.dim, self.width), device, source), "weight", "weight", rows)
            features += heads * self.dim
            groups.append(HeadGroup(f"{layer}.{part}", layer, part, "encoder", "", "given", (own,)))
        return groups


def _module(shape: tuple[int, int], device: torch.device, source: torch.Generator) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(0.02 * torch.randn(shape, device=device, generator=source))
    module.weight.grad = 1e-3 * torch.randn(shape, device=device, generator=source)
    return module


SHAPES = {
    "bert-base": Shape(12, 768, 12, 12),  # ViT-B/16 has the same
    "bert-large": Shape(24, 1024, 16, 16),
    "gpt2": Shape(12, 768, 12, 12, packed=True),
    "llama": Shape(24, 896, 14, 2),
    "toy": Shape(2, 16, 2, 2, dim=8),
}


def buckets(name: str, device: torch.device, layers: int | None = None) -> dict[str, list[HeadGroup]]:
    """Make the groups of a model, by number of heads; the keys name the model, and the heads if they differ."""
    by_heads: dict[int, list[HeadGroup]] = {}
    for group in SHAPES[name].groups(device, layers):
        by_heads.setdefault(group.num_heads, []).append(group)
    return {name if len(by_heads) == 1 else f"{name}, {heads} heads": some for heads, some in by_heads.items()}


class Launches:
    """The launches of one fused update with the current launch settings.

    Args:
        groups: groups with the same number of heads.
    """

    def __init__(self, groups: list[HeadGroup]) -> None:
        self.update = FusedUpdate(groups, seed=0)
        assert self.update.refresh()
        self.parameters: list[Tensor] = self.update.table.parameters
        self.numbers = sum(group.num_heads * group.dim for group in groups)
        self._rates = {id(parameter): LEARNING_RATE for parameter in self.parameters}
        self._optimizer: torch.optim.Optimizer | None = None
        self._step = 0

    def variant(self, rule: str) -> Variant:
        """Send the numbers of a rule to the device, and return what it launches."""
        chosen, update = rule_by_name(rule), self.update
        is_noisy = rule in NOISE_IN_GRADIENT and update.noise.set(chosen, self._rates, 0, None)
        form = chosen.radial_form(0)
        assert form is not None
        return update._prepare(chosen, form, (False, is_noisy, False)).variant

    def alone(self) -> dict[str, tuple[Callable[[], Any], float]]:
        """Return functions that launch one Triton kernel (or two), and their passes over the weights."""
        update, variant = self.update, self.variant("spos-paper")
        return {
            "gram": (lambda: update._gram(1, norms_only=False), 1),
            "gram and norms of gradients": (lambda: update._gram(2, norms_only=True), 2),
            "solve": (lambda: update._solve(variant), 0),
            "gram, solve": (lambda: (update._gram(1, norms_only=False), update._solve(variant)), 1),
            "combine": (lambda: update._combine(Combination()), 3),
            "combine with noise": (lambda: update._combine(Combination(is_noisy=True)), 3),
            "step noise": (self._add_step_noise, 5),
        }

    def whole(self, rule: str) -> tuple[Callable[[], Any], float]:
        """Return a function that launches the update of a rule, as a CUDA graph on a GPU, and its passes."""
        variant = self.variant(rule)
        passes = 5 if variant.reads_gradients else 4
        if self.update.table.device.type != "cuda":
            return lambda: self.update._launch(variant), passes
        self.update._launch(variant)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.update._launch(variant)
        return partial(self._replay, graph), passes

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph; a method, so that the buffers of the update live as long as the graph."""
        graph.replay()

    def _add_step_noise(self) -> None:
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0)
            self._optimizer.step()
        self._step += 1
        if not self.update.add_step_noise(SPOS(), self._optimizer, step=self._step):
            raise RuntimeError("the state of AdamW does not fit the launch of the step noise")


def oracle(groups: list[HeadGroup], rule: str) -> list[Tensor]:
    """Compute the new gradients of a rule without noise in float64, in the order of `Launches.parameters`."""
    chosen, results = rule_by_name(rule), {}
    for group in groups:
        (part,) = group.slices
        weight = part.parameter()
        assert weight.grad is not None
        theta, grad = (part.take(tensor).double() for tensor in (weight.detach(), weight.grad))
        result = results.setdefault(id(weight), weight.grad.double())
        part.put(result, chosen.gradient(theta, grad))
    return list(results.values())


class Clock:
    """Measure the time of launches on weights and gradients that are not in the L2 cache.

    Args:
        parameters: weights; their gradients are restored before each repetition.
        repeats: number of repetitions; the result is their median.
    """

    def __init__(self, parameters: list[Tensor], repeats: int) -> None:
        self._weights = [parameter.detach() for parameter in parameters]
        self._gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._saved = [[tensor.clone() for tensor in some] for some in (self._weights, self._gradients)]
        self._repeats, self._device = repeats, parameters[0].device
        on_gpu = self._device.type == "cuda"
        self._flush = torch.empty(FLUSH // 4 if on_gpu else 1, device=self._device)

    def restore(self) -> None:
        """Restore the gradients."""
        torch._foreach_copy_(self._gradients, self._saved[1])

    def restore_all(self) -> None:
        """Restore weights and gradients."""
        torch._foreach_copy_(self._weights, self._saved[0])
        self.restore()

    def seconds(self, function: Callable[[], Any]) -> float:
        """Measure the median seconds of a function; on a GPU between events, without the time of the host."""
        if self._device.type != "cuda":
            return statistics.median(self._wall(function) for _ in range(self._repeats))
        self.restore()
        function()  # compiles
        pairs = []
        for _ in range(self._repeats):
            self.restore()
            self._flush.zero_()
            self._flush.sum()  # leaves no lines in the cache that have to be written back
            torch.cuda._sleep(SLEEP)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3

    def gradients_after(self, function: Callable[[], Any]) -> list[Tensor]:
        """Return the gradients that a function makes of the saved ones."""
        self.restore()
        function()
        return [gradient.clone() for gradient in self._gradients]

    def _wall(self, function: Callable[[], Any]) -> float:
        self.restore()
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

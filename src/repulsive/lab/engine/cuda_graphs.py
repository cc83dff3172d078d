"""Run forward and backward pass as CUDA graphs, one per batch shape: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repulsive.repulsion.cuda_graphs import without_garbage_collection

Inputs = dict[str, Tensor]
_CAPTURE_AT = 3  # a shape is captured when it occurs for the third time; capturing rarer shapes is not worth its cost


@dataclass(eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs


class CapturedGradients:
    """Call `compute(inputs, length)`, and replay it as a CUDA graph for frequent batch shapes.

    The first two batches of a shape run eagerly; the third is captured, and later ones are replayed. From the first
    capture on, gradients have fixed addresses: those of the first graph, to which all other passes copy theirs. Replays
    draw random numbers from torch's generator, as eager calls do.

    Args:
        compute: forward and backward pass; it writes to `.grad` and must not synchronise.
        parameters: the parameters that get gradients.
        device: a GPU.
    """

    def __init__(
        self, compute: Callable[[Inputs, int], None], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self._compute = compute
        self._device = device
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._grads: list[Tensor] = []  # fixed after the first capture
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._occurrences: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Captured] = {}

    def __call__(self, inputs: Inputs, length: int) -> None:
        key = (length, *((name, tuple(x.shape)) for name, x in inputs.items()))
        if (captured := self._graphs.get(key)) is not None:
            for name, value in inputs.items():
                captured.inputs[name].copy_(value, non_blocking=True)
            captured.graph.replay()
            return
        self._occurrences[key] = self._occurrences.get(key, 0) + 1
        moved = {name: value.to(self._device) for name, value in inputs.items()}
        if self._occurrences[key] < _CAPTURE_AT:
            self._run_on_side_stream(moved, length)
        else:
            own = {name: value.clone() for name, value in moved.items()}  # copied: replays overwrite these tensors
            captured = _Captured(torch.cuda.CUDAGraph(), own)
            torch.cuda.synchronize(self._device)
            with without_garbage_collection(), torch.cuda.graph(captured.graph, pool=self._pool, stream=self._stream):
                self._run(own, length)
                self._grads = self._grads or self._gradients()
            self._graphs[key] = captured
            captured.graph.replay()  # capturing computes nothing

    def _run_on_side_stream(self, inputs: Inputs, length: int) -> None:
        """Run eagerly on the stream of the captures, so that libraries initialise themselves for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(inputs, length)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _run(self, inputs: Inputs, length: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None  # backward then stores the first gradient instead of adding it to zeros
        self._compute(inputs, length)
        if self._grads:
            torch._foreach_copy_(self._grads, self._gradients())
            for parameter, place in zip(self._parameters, self._grads, strict=True):
                parameter.grad = place

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters; zeros for a parameter that got no gradient."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

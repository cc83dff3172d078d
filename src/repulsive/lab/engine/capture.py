"""Forward and backward as CUDA graphs, one for each shape of batch: a launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
_SEEN = 3  # shapes met so often are captured; rarer ones are not worth it


@dataclass(eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs


class CapturedGradients:
    """Calls `compute(inputs, length)`, which must make gradients in `.grad` and wait for nothing.

    Shapes are run as they are until they have been met three times, then captured and replayed. From the first capture
    on, gradients keep their place in memory: where that graph makes them, and others copy theirs to. Random numbers in
    a replay go on from torch's generator, as they do without.

    Args:
        compute: forward and backward.
        parameters: whose gradients it makes.
        device: a GPU.
    """

    def __init__(
        self, compute: Callable[[Inputs, int], None], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self._compute = compute
        self._device = device
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._grads: list[Tensor] = []  # their place, once there is one
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Captured] = {}

    def __call__(self, inputs: Inputs, length: int) -> None:
        key = (length, *((name, tuple(x.shape)) for name, x in inputs.items()))
        if (captured := self._graphs.get(key)) is not None:
            for name, value in inputs.items():
                captured.inputs[name].copy_(value, non_blocking=True)
            captured.graph.replay()
            return
        self._seen[key] = self._seen.get(key, 0) + 1
        moved = {name: value.to(self._device) for name, value in inputs.items()}
        if self._seen[key] < _SEEN:
            self._on_side_stream(moved, length)
        else:
            own = {name: value.clone() for name, value in moved.items()}  # replays overwrite them
            captured = _Captured(torch.cuda.CUDAGraph(), own)
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(captured.graph, pool=self._pool, stream=self._stream):
                self._afresh(own, length)
                self._grads = self._grads or self._made()
            self._graphs[key] = captured
            captured.graph.replay()  # capturing computes nothing

    def _on_side_stream(self, inputs: Inputs, length: int) -> None:
        """Where captures happen too: libraries set themselves up there."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._afresh(inputs, length)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _afresh(self, inputs: Inputs, length: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None  # so that the first gradient is kept, not added to zeros
        self._compute(inputs, length)
        if self._grads:
            torch._foreach_copy_(self._grads, self._made())
            for parameter, place in zip(self._parameters, self._grads, strict=True):
                parameter.grad = place

    def _made(self) -> list[Tensor]:
        """Gradients of all parameters: zeros where there is none."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

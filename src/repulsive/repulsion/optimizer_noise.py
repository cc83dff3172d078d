r"""Langevin noise that follows the optimizer's own step: `repel(noise_in="optimizer")`.

An optimizer filters gradients over time (momentum) and rescales them per weight (second moment). If one unit of
gradient moves weight i by $\eta_i$ in total, over this step and later ones, then noise $n_i$ in its gradient has
temperature T for

$$n_i \sim N(0, 2 T / \eta_i)$$

| optimizer | $\eta_i$ |
| --- | --- |
| SGD | lr (1 - dampening) / (1 - momentum) |
| Adam, AdamW | lr / (sqrt(v) + eps), with v corrected for its start at zero |
| RMSprop | lr / ((sqrt(v) + eps) (1 - momentum)) |

The noise is added after the step, to the parameter and to the momentum buffer, as if it had been part of the gradient.
It does not enter v, and is not clipped. Until v has averaged over enough steps, $\eta_i$ can be very large by chance.
Therefore T is multiplied by $1 - \beta_2^t$, and weights with v = 0 get no noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.errors import OptimizerError
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.particles.gram import compute_dtype
from repulsive.particles.rule import Rule
from repulsive.repulsion.cuda_graphs import is_capturing

Number = float | Tensor


@dataclass(frozen=True)
class Response:
    """The effect of noise in the gradient of one parameter; each factor is a number, or a tensor shaped as the weight.

    Args:
        variance: variance of the noise, divided by 2T.
        step: factor with which it is subtracted from the parameter in this step.
        kept: factor with which it is added to `buffer`, and so moves the parameter in later steps.
        buffer: the momentum buffer; None without momentum.
    """

    variance: Number
    step: Number
    kept: Number = 0.0
    buffer: Tensor | None = None


def sgd_response(entry: Mapping[str, Any], state: Mapping[str, Any]) -> Response:
    """Response of `torch.optim.SGD`, with or without momentum, dampening and Nesterov's form."""
    lr, momentum = entry["lr"], entry["momentum"]
    if not momentum:
        return Response(1 / lr, lr)
    kept = 1 - entry["dampening"]
    step = lr * (1 + momentum * kept) if entry["nesterov"] else lr * kept
    return Response((1 - momentum) / (lr * kept), step, kept, _local(state["momentum_buffer"]))


def adam_response(entry: Mapping[str, Any], state: Mapping[str, Any]) -> Response:
    """Response of `torch.optim.Adam` and `AdamW`."""
    first, second = entry["betas"]
    steps = _steps(state)
    averaged = 1 - second**steps  # share of v that is not its start at zero
    square = _wide(state["max_exp_avg_sq" if entry["amsgrad"] else "exp_avg_sq"])
    divisor = (square / averaged).sqrt() + entry["eps"]
    step = entry["lr"] * (1 - first) / (1 - first**steps) / divisor
    return Response(_variance(square, divisor, averaged, entry["lr"]), step, 1 - first, _local(state["exp_avg"]))


def rmsprop_response(entry: Mapping[str, Any], state: Mapping[str, Any]) -> Response:
    """Response of `torch.optim.RMSprop`, with or without momentum and centring."""
    lr, momentum = entry["lr"], entry["momentum"]
    square = _wide(state["square_avg"])
    if entry["centered"]:
        square = square - _wide(state["grad_avg"]).square()
    divisor = square.sqrt() + entry["eps"]
    variance = _variance(square, divisor, 1 - entry["alpha"] ** _steps(state), lr)
    if not momentum:
        return Response(variance, lr / divisor)
    return Response((1 - momentum) * variance, lr / divisor, 1 / divisor, _local(state["momentum_buffer"]))


Respond = Callable[[Mapping[str, Any], Mapping[str, Any]], Response]
RESPONSES: dict[type[Optimizer], Respond] = {
    torch.optim.SGD: sgd_response,
    torch.optim.Adam: adam_response,
    torch.optim.AdamW: adam_response,
    torch.optim.RMSprop: rmsprop_response,
}


def response_of(optimizer: Optimizer) -> Respond | None:
    """Return the response of an optimizer whose `step` is that of a supported class; None for others."""
    own = inspect.unwrap(type(optimizer).step)
    for kind, respond in RESPONSES.items():
        if isinstance(optimizer, kind) and own is inspect.unwrap(kind.step):
            return respond
    return None


def add_noise(rule: Rule, optimizer: Optimizer, noise: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add the noise of a rule to parameters and momentum buffers, after a step of the optimizer.

    Args:
        rule: a rule with noise.
        optimizer: an optimizer that `check_noise` accepts.
        noise: parameters, each with standard normal numbers for its local part: zero outside of heads.

    Raises:
        OptimizerError: the step is captured into a CUDA graph.
    """
    if is_capturing():
        raise OptimizerError(
            "noise that follows the optimizer's step cannot be captured into a CUDA graph: every replay would add the "
            "same noise. Capture the forward and backward pass only; or use noise_in='gradient', which samples the "
            "distribution of the rule under SGD without momentum only"
        )
    respond = response_of(optimizer)
    assert respond is not None
    entries = {id(p): entry for entry in optimizer.param_groups for p in entry["params"]}
    scale = rule.noise_scale(1.0)
    for parameter, normal in noise:
        entry = entries[id(parameter)]
        if float(entry["lr"]) == 0:
            continue
        response = respond(entry, optimizer.state[parameter])
        gradient_noise = normal * scale * response.variance**0.5
        _local(parameter.detach()).sub_(response.step * gradient_noise)
        if response.buffer is not None:
            response.buffer.add_(response.kept * gradient_noise)


def _variance(square: Tensor, divisor: Tensor, averaged: Number, lr: Number) -> Tensor:
    """averaged / (lr / divisor); zero for weights that never had a gradient, whose step has no scale."""
    return torch.where(square > 0, divisor * averaged / lr, 0.0)


def _steps(state: Mapping[str, Any]) -> Number:
    """Number of steps of one parameter; in float64, because 1 - 0.999 ** t cancels in float32."""
    steps: Number = state["step"]
    return steps.to(torch.float32 if steps.device.type == "mps" else torch.float64) if torch.is_tensor(steps) else steps


def _wide(tensor: Tensor) -> Tensor:
    """The local part of a tensor in the dtype of computation."""
    return _local(tensor).to(compute_dtype(tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor

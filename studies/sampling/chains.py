"""Many independent Langevin chains, run by `repel` as the weights of one linear layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from repulsive import SGLD, heads_by_hand, repel
from repulsive.repulsion.settings import NoisePlace

Gradient = Callable[[Tensor], Tensor]  # of U, for chains [C, D]


@dataclass(frozen=True)
class Method:
    """An optimizer and its settings.

    Args:
        label: its name in tables.
        kind: its class.
        options: its settings, without the learning rate.
        sum_of_steps: the sum of all steps that one unit of gradient causes, divided by lr.
        is_normalised: whether it divides by the root mean square of gradients.
        window: number of steps that the mean square covers.
        decay: decoupled weight decay.
    """

    label: str
    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    sum_of_steps: float = 1.0
    is_normalised: bool = False
    window: float = 1.0
    decay: float = 0.0


METHODS = (
    Method("SGD", torch.optim.SGD),
    Method("SGD, momentum 0.9", torch.optim.SGD, {"momentum": 0.9}, 10.0),
    Method("SGD, Nesterov 0.9", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 10.0),
    Method("Adam", torch.optim.Adam, {}, 1.0, True, 1000),
    Method("Adam, b2 0.9999", torch.optim.Adam, {"betas": (0.9, 0.9999)}, 1.0, True, 10000),
    Method("AdamW", torch.optim.AdamW, {"weight_decay": 0.01}, 1.0, True, 1000, 0.01),
    Method("RMSprop", torch.optim.RMSprop, {}, 1.0, True, 100),
    Method("RMSprop, alpha 0.999", torch.optim.RMSprop, {"alpha": 0.999}, 1.0, True, 1000),
)


@dataclass(frozen=True)
class Moments:
    """Moments of samples, over chains and steps.

    Args:
        mean: [D].
        covariance: [D, D], about the true mean of zero unless `centre` was given.
        kurtosis: fourth moment over the squared variance, [D]; 3 for a Gaussian.
    """

    mean: Tensor
    covariance: Tensor
    kurtosis: Tensor


def sample(
    method: Method,
    noise_in: NoisePlace,
    gradient: Gradient,
    start: Tensor,
    *,
    lr: float,
    steps: int,
    burn_in: int,
    rms: float | Tensor | None = None,
    gradient_noise: float | Tensor = 0.0,
    temperature: float = 1.0,
    stepsize: float = 1.0,
    seed: int = 0,
    centre: float | Tensor = 0.0,
) -> Moments:
    """Run chains and return the moments of their samples.

    Args:
        method: the optimizer.
        noise_in: see `repel`.
        gradient: of U.
        start: [C, D].
        lr: learning rate.
        steps: steps after `burn_in`, each of which is a sample.
        burn_in: steps that are dropped.
        rms: root mean square of gradients with which the second moment starts, a number or [D]; None: zero.
        gradient_noise: standard deviation of noise in the gradients, as minibatches have; a number, or [D].
        temperature: T of the rule.
        stepsize: of the rule.
        seed: of both kinds of noise.
        centre: the mean about which second and fourth moments are taken.
    """
    model = nn.Linear(start.shape[1], start.shape[0], bias=False, dtype=start.dtype)
    weight = model.weight
    with torch.no_grad():
        weight.copy_(start)
    optimizer = method.kind([weight], lr=lr, **method.options)
    if rms is not None and method.is_normalised:
        _start_averaged(optimizer, weight, torch.as_tensor(stepsize * rms, dtype=start.dtype))
    groups = heads_by_hand(model, {"weight": ("q", 1)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of single heads, which is intended
        handle = repel(
            model,
            optimizer,
            SGLD(stepsize, temperature),
            groups=groups,
            noise_in=noise_in,
            seed=seed,
            measure_every=10**9,
            verbose=False,
        )
    source = torch.Generator().manual_seed(seed)
    dims = start.shape[1]
    mean, square, fourth = torch.zeros(dims), torch.zeros(dims, dims), torch.zeros(dims)
    for index in range(burn_in + steps):
        grad = gradient(weight.detach())
        if torch.as_tensor(gradient_noise).any():
            grad = grad + gradient_noise * torch.randn(grad.shape, generator=source, dtype=grad.dtype)
        weight.grad = grad.clone()
        optimizer.step()
        if index >= burn_in:
            theta = (weight.detach() - centre).float()
            mean += theta.mean(0)
            square += theta.T @ theta / len(theta)
            fourth += theta.pow(4).mean(0)
    handle.remove()
    mean, square, fourth = mean / steps, square / steps, fourth / steps
    return Moments(mean + centre, square, fourth / square.diagonal().square())


def _start_averaged(optimizer: Optimizer, weight: Tensor, rms: Tensor) -> None:
    """Give the optimizer the state of a long run: a second moment of `rms` squared, and no momentum."""
    square = rms.square().expand_as(weight).clone()
    state: dict[str, Any] = {"step": torch.tensor(1e7)}
    if isinstance(optimizer, torch.optim.RMSprop):
        optimizer.state[weight] = state | {"square_avg": square}
    else:
        optimizer.state[weight] = state | {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": square}

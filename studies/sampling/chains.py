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
from repulsive.repulsion import fix_second_moment
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
        is_fixed: whether `fix_second_moment` is called, after a quarter of the burn-in.
    """

    label: str
    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    sum_of_steps: float = 1.0
    is_normalised: bool = False
    window: float = 1.0
    decay: float = 0.0
    is_fixed: bool = False

    @property
    def momentum(self) -> float:
        """Decay rate of the average of gradients; 0 without momentum."""
        is_adam = issubclass(self.kind, torch.optim.Adam | torch.optim.AdamW)
        return float(self.options.get("momentum", 0.9 if is_adam else 0.0))


SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
METHODS = (
    Method("SGD", SGD),
    Method("SGD, momentum 0.9", SGD, {"momentum": 0.9}, 10.0),
    Method("SGD, Nesterov 0.9", SGD, {"momentum": 0.9, "nesterov": True}, 10.0),
    Method("Adam", ADAM, {}, 1.0, True, 1e3),
    Method("Adam, b2 0.9999", ADAM, {"betas": (0.9, 0.9999)}, 1.0, True, 1e4),
    Method("Adam, b2 0.99999", ADAM, {"betas": (0.9, 0.99999)}, 1.0, True, 1e5),
    Method("Adam, fixed v", ADAM, {}, 1.0, True, 1e3, is_fixed=True),
    Method("AdamW", ADAMW, {"weight_decay": 0.01}, 1.0, True, 1e3, 0.01),
    Method("AdamW, b2 0.99999", ADAMW, {"betas": (0.9, 0.99999), "weight_decay": 0.01}, 1.0, True, 1e5, 0.01),
    Method("AdamW, fixed v", ADAMW, {"weight_decay": 0.01}, 1.0, True, 1e3, 0.01, is_fixed=True),
    Method("RMSprop", RMSPROP, {}, 1.0, True, 1e2),
    Method("RMSprop, alpha 0.999", RMSPROP, {"alpha": 0.999}, 1.0, True, 1e3),
    Method("RMSprop, alpha 0.99999", RMSPROP, {"alpha": 0.99999}, 1.0, True, 1e5),
    Method("RMSprop, fixed v", RMSPROP, {}, 1.0, True, 1e2, is_fixed=True),
)


@dataclass(frozen=True)
class Moments:
    """Moments of the samples of each chain. Chains are independent, so that their spread gives standard errors.

    Args:
        chain_means: [C, D].
        chain_squares: second moments, about zero unless `centre` was given, [C, D, D].
        kurtosis: fourth moment over the squared variance of all samples, [D]; 3 for a Gaussian.
    """

    chain_means: Tensor
    chain_squares: Tensor
    kurtosis: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of all samples, [D]."""
        return self.chain_means.mean(0)

    @property
    def covariance(self) -> Tensor:
        """Second moment of all samples, [D, D]."""
        return self.chain_squares.mean(0)


def sample(
    method: Method,
    noise_in: NoisePlace,
    gradient: Gradient,
    start: Tensor,
    *,
    lr: float,
    steps: int,
    burn_in: int,
    every: int = 1,
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
        steps: steps after `burn_in`.
        burn_in: steps that are dropped.
        every: number of steps from one sample to the next.
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
    count, dims = start.shape
    mean, square, fourth = torch.zeros(count, dims), torch.zeros(count, dims, dims), torch.zeros(dims)
    samples = range(burn_in, burn_in + steps, every)
    for index in range(burn_in + steps):
        if method.is_fixed and index == burn_in // 4:
            fix_second_moment(optimizer)
        grad = gradient(weight.detach())
        if torch.as_tensor(gradient_noise).any():
            grad = grad + gradient_noise * torch.randn(grad.shape, generator=source, dtype=grad.dtype)
        weight.grad = grad.clone()
        optimizer.step()
        if index in samples:
            theta = (weight.detach() - centre).float()  # [C, D]
            mean += theta
            square += theta[:, :, None] * theta[:, None, :]
            fourth += theta.pow(4).mean(0)
    handle.remove()
    mean, square, fourth = mean / len(samples), square / len(samples), fourth / len(samples)
    return Moments(mean + centre, square, fourth / square.mean(0).diagonal().square())


def _start_averaged(optimizer: Optimizer, weight: Tensor, rms: Tensor) -> None:
    """Give the optimizer the state of a long run: a second moment of `rms` squared, and no momentum."""
    square = rms.square().expand_as(weight).clone()
    state: dict[str, Any] = {"step": torch.tensor(1e12)}
    if isinstance(optimizer, torch.optim.RMSprop):
        optimizer.state[weight] = state | {"square_avg": square}
    else:
        optimizer.state[weight] = state | {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": square}

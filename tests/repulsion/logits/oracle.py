"""Reference implementation of the force between logits: a double loop over token pairs and autograd, in float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def functions(q: Tensor, k: Tensor, reads: list[int], valid_q: Tensor, valid_k: Tensor) -> list[Tensor]:
    """f_i(x, y) for every pair of real tokens, as one vector per head.

    Args:
        q: [B, T, M, d].
        k: [B, S, K, d].
        reads: key head of each query head.
        valid_q, valid_k: bool [B, T], [B, S].
    """
    keys = []
    for sequence, valid in zip(k, valid_k, strict=True):
        real = sequence[valid]
        keys.append(real - real.mean(0))
    queries = q[valid_q]  # [N, M, d]
    centred = torch.cat(keys)  # [N', K, d]
    vectors = []
    for head, key_head in enumerate(reads):
        rows = [torch.stack([x[head] @ y[key_head] for y in centred]) for x in queries]
        vectors.append(torch.stack(rows).flatten())
    return vectors


def energy(vectors: list[Tensor], kernel: str) -> Tensor:
    """Sum of kernel values of each unit function with all others, which are held fixed."""
    units = [v / v.norm() for v in vectors]
    heads = len(units)
    distances = sorted(float((units[i] - units[j]).norm().detach()) for i in range(heads) for j in range(i + 1, heads))
    middle = len(distances) // 2
    median = distances[middle] if len(distances) % 2 else (distances[middle - 1] + distances[middle]) / 2
    h = median**2 / math.log(heads)
    total = vectors[0].new_zeros(())
    for i in range(heads):
        for j in range(heads):
            if i != j:
                other = units[j].detach()
                value = units[i] @ other if kernel == "cosine" else torch.exp(-(units[i] - other).square().sum() / h)
                total = total + value
    return total


def expected_gradients(
    project: Callable[[], tuple[Tensor, Tensor, list[int], Tensor, Tensor]],
    parameters: list[Tensor],
    kernel: str,
    factor: float,
) -> list[Tensor]:
    """Expected gradient of each parameter: factor x gradient of the energy."""
    value = factor * energy(functions(*project()), kernel)
    grads = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]

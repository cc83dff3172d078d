r"""Positions of heads in a plane, by the similarity of their attention logits.

The cosines of a layer are the Gram matrix K of its heads as unit vectors, so that $|f_i - f_j|^2 = 2 - 2 K_{ij}$.
Classical scaling (Torgerson, 1952) takes the two largest eigenvalues of $J K J$ with $J = I - 1/M$:
$x_{ia} = \sqrt{\lambda_a}\, u_{ia}$. The result is determined up to rotation and reflection. Each frame is therefore
turned onto the frame before by the orthogonal matrix that minimises the squared distances (Schoenemann, 1966).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEIGHBOURS = 2  # frames before and after each frame in its average; fewer at both ends


def classical_scaling(cosine: Tensor) -> Tensor:
    """Embed M heads in a plane: cosines [M, M] -> centred positions [M, 2].

    Example:
        >>> classical_scaling(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).abs()
        tensor([[1., 0.],
                [1., 0.]], dtype=torch.float64)
    """
    kernel = cosine.double()
    centred = kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
    values, vectors = torch.linalg.eigh((centred + centred.mT) / 2)  # ascending
    positions = vectors[:, -2:].flip(-1) * values[-2:].flip(-1).clamp(min=0).sqrt()  # [M, 2]
    return torch.nn.functional.pad(positions, (0, 2 - positions.shape[-1]))


def align(positions: Tensor, target: Tensor) -> Tensor:
    """Rotate and reflect centred positions [M, 2] so that they lie as close as possible to the target [M, 2]."""
    left, _, right = torch.linalg.svd(positions.mT @ target)
    return positions @ (left @ right)


def aligned_positions(cosines: Sequence[Tensor]) -> list[Tensor]:
    """Embed the heads of one layer over time, each frame turned onto the one before.

    Nearly orthogonal heads have no stable plane: its eigenvalues are almost equal, and noise swaps them. Cosines are
    therefore averaged over neighbouring frames first.

    Args:
        cosines: one matrix [M, M] per frame.

    Returns:
        Positions [M, 2] per frame.
    """
    frames: list[Tensor] = []
    for number in range(len(cosines)):
        reach = min(_NEIGHBOURS, number, len(cosines) - 1 - number)
        cosine = torch.stack(list(cosines[number - reach : number + reach + 1])).mean(0)
        positions = classical_scaling(cosine)
        frames.append(align(positions, frames[-1]) if frames else positions)
    return frames

r"""Linear centred kernel alignment (Kornblith et al., 2019) between the outputs of heads.

$$\mathrm{CKA}(X, Y) = \frac{\|X^\top Y\|_F^2}{\|X^\top X\|_F\,\|Y^\top Y\|_F}$$

for outputs X, Y [N, d] of two heads on the same N tokens, centred over tokens. It is 1 if Y is a rotation and scaling
of X, so it also finds heads that compute the same function in another basis, which cosines miss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.particles.gram import wide_dtype

TOKENS = 1024  # largest number of tokens; of more tokens, an evenly spaced subset is used


@torch.no_grad()
def linear_cka(outputs: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute the linear CKA of every pair of heads.

    Args:
        outputs: outputs of each head [B, M, T, d].
        real: which tokens count, bool [B, T]; None: all.

    Returns:
        [M, M], between 0 and 1; 0 for a head with constant output.

    Example:
        >>> x = torch.randn(1, 1, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> rotated = x.flip(-1) * 3
        >>> round(float(linear_cka(torch.cat([x, rotated], 1))[0, 1]), 6)
        1.0
    """
    heads = outputs.transpose(0, 1).flatten(1, 2)  # [M, N, d]
    if real is not None:
        heads = heads[:, real.flatten().to(heads.device)]
    if heads.shape[1] > TOKENS:
        heads = heads[:, torch.linspace(0, heads.shape[1] - 1, TOKENS).long()]
    x = heads.to(wide_dtype(heads.device))
    x = x - x.mean(1, keepdim=True)
    grams = (x @ x.mT).flatten(1)  # [M, N N]: ||X^T Y||^2 is the inner product of the two Gram matrices
    products = grams @ grams.mT
    norms = products.diagonal().sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products / scale.clamp(min=torch.finfo(x.dtype).tiny), 0).clamp(0, 1)

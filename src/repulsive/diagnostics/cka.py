r"""Linear centred kernel alignment (Kornblith et al., 2019) between the outputs of heads.

$$\mathrm{CKA}(X, Y) = \frac{\|X^\top Y\|_F^2}{\|X^\top X\|_F\,\|Y^\top Y\|_F}$$

for outputs X, Y [N, d] of two heads on the same N tokens, centred over tokens. It is 1 if Y is a rotation and scaling
of X, so it also finds heads that compute the same function in another basis, which cosines miss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.diagnostics.permuted_heads import evenly_spaced
from repulsive.particles.gram import wide_dtype

TOKENS = 512  # largest number of tokens; of more tokens, an evenly spaced subset is used
_ROUNDING = 1e-12  # relative size of rounding errors of centred inner products in float64
_CONSTANT = 1e-6  # largest deviation from the mean token, relative to the outputs, that counts as rounding error


@torch.no_grad()
def token_grams(outputs: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the Gram matrix of each head over tokens, [M, N, N], and the item that each token belongs to, [N].

    Args:
        outputs: outputs of each head [B, M, T, d].
        real: which tokens count, bool [B, T]; None: all.
    """
    heads = outputs.transpose(0, 1).flatten(1, 2)  # [M, N, d]
    items = torch.arange(len(outputs), device=heads.device).repeat_interleave(outputs.shape[2])  # [N]
    if real is not None:
        mask = real.flatten().to(heads.device)
        heads, items = heads[:, mask], items[mask]
    if heads.shape[1] > TOKENS:
        chosen = evenly_spaced(heads.shape[1], TOKENS).to(heads.device)
        heads, items = heads[:, chosen], items[chosen]
    x = centre_tokens(heads.to(wide_dtype(heads.device)))
    return x @ x.mT, items


def centre_tokens(heads: Tensor) -> Tensor:
    """Subtract the mean token of each head, [M, N, d] -> [M, N, d].

    Zeros for a head with constant output, whose deviations are rounding errors of float32: attention weights do not sum
    to exactly one.
    """
    centred = heads - heads.mean(1, keepdim=True)
    sizes, rests = (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (heads, centred))  # [M, 1, 1]
    return centred.masked_fill(rests <= _CONSTANT * sizes, 0)


@torch.no_grad()
def cka_of_grams(grams: Tensor) -> Tensor:
    """Compute the linear CKA of every pair of heads, between 0 and 1; 0 for a head with constant output.

    Args:
        grams: Gram matrix of each head over tokens [M, N, N], from `token_grams`.

    Returns:
        [M, M].
    """
    centred = grams - grams.mean(1, keepdim=True)
    flat = (centred - centred.mean(2, keepdim=True)).flatten(1)  # [M, N N]: ||X^T Y||^2 is an inner product of Grams
    return _normalised(flat @ flat.mT)


@torch.no_grad()
def cka_without_groups(grams: Tensor, groups: Tensor, count: int) -> Tensor:
    r"""Compute the linear CKA without the tokens of each group, [K, M, M]; nan if no token remains.

    For Gram matrices K, L over the n remaining tokens with row sums r, s, the inner product of the centred matrices is
    $\sum_{ab} K_{ab} L_{ab} - \frac2n \sum_a r_a s_a + \frac1{n^2} \sum_a r_a \sum_a s_a$. The first sum is computed
    once for each pair of groups, so all K results together cost about as much as one.

    Args:
        grams: Gram matrix of each head over tokens [M, N, N].
        groups: the group of each token [N], from 0 to `count` - 1.
        count: K.
    """
    own = [(groups == group).nonzero()[:, 0] for group in range(count)]
    heads = len(grams)
    blocks = grams.new_zeros(count, count, heads, heads)
    rows = grams.new_zeros(heads, grams.shape[1], count)  # sum of each row over the tokens of each group
    for first, these in enumerate(own):
        columns = grams[:, :, these]  # [M, N, n]
        rows[:, :, first] = columns.sum(2)
        for second, others in enumerate(own[: first + 1]):
            flat = columns[:, others].flatten(1)  # [M, n n']
            blocks[first, second] = blocks[second, first] = flat @ flat.mT
    total = blocks.sum((0, 1))
    result = []
    for group, these in enumerate(own):
        left = grams.shape[1] - len(these)
        if not left:
            result.append(torch.full_like(total, torch.nan))
            continue
        entries = total - blocks[group].sum(0) - blocks[:, group].sum(0) + blocks[group, group]
        sums = (rows.sum(2) - rows[:, :, group])[:, groups != group]  # [M, n]
        whole = sums.sum(1)
        products = entries - 2 / left * sums @ sums.mT + whole[:, None] * whole[None, :] / left**2
        is_constant = products.diagonal() <= _ROUNDING * entries.diagonal()  # what remains is rounding error
        result.append(_normalised(products.masked_fill(is_constant[:, None] | is_constant[None, :], 0)))
    return torch.stack(result) if result else grams.new_zeros(0, heads, heads)


def _normalised(products: Tensor) -> Tensor:
    """Divide inner products of Gram matrices [M, M] by the norms; 0 for a head with constant output."""
    norms = products.diagonal().clamp(min=0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products / scale.clamp(min=torch.finfo(products.dtype).tiny), 0).clamp(0, 1)

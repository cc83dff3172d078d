"""Norms on queries, keys and values as differentiable formulas, so that a force can be pulled back through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from repulsive.errors import RuleError


@dataclass(frozen=True)
class NormFormula:
    """Norm formula `scale * (x - mean) / sqrt(variance + eps) + shift` over the last axis; RMS norms omit the mean.

    Args:
        centres: whether the mean is subtracted (LayerNorm).
        whole: whether statistics are computed over the full width of all heads, instead of over each head.
        eps: added to the variance.
        scale, shift: effective values, [M, d], or [M d] if `whole`, after any leading axes; some norms store scale - 1.
    """

    centres: bool
    whole: bool
    eps: float
    scale: Tensor
    shift: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., M, d]."""
        shape = x.shape
        x = x.flatten(-2) if self.whole else x
        if self.centres:
            x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x * self.scale.to(x.dtype) + self.shift.to(x.dtype)).view(shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for formulas that can be stacked."""
        return self.centres, self.whole, self.eps, tuple(self.scale.shape)


def stack_formulas(norms: Sequence[NormFormula]) -> NormFormula:
    """Join the formulas of L layers of one kind to one formula for [L, N, M, d]."""
    scale, shift = (torch.stack([getattr(norm, name) for norm in norms]).unsqueeze(1) for name in ("scale", "shift"))
    return replace(norms[0], scale=scale, shift=shift)


def formula_of(norm: nn.Module, tokens: Tensor, name: str, centres: bool | None = None) -> NormFormula:
    """Derive the formula of a norm module, and check it on tokens unless its kind is known.

    Args:
        norm: the norm module.
        tokens: projected tokens [N, M, d].
        name: name of the projection, for the error message.
        centres: the field of an earlier formula of this norm; the check waits for all work of a GPU.

    Raises:
        RuleError: the module is neither a layer norm nor an RMS norm.
    """
    heads, width = tokens.shape[-2:]
    weight = getattr(norm, "weight", None)
    whole = weight is not None and weight.ndim == 1 and weight.numel() == heads * width and heads > 1
    eps = _eps(norm, tokens.dtype)
    with torch.no_grad():
        example = tokens.new_ones(1, heads * width)
        example[:, 1::2] = -1  # mean 0 and variance 1, so a norm returns scale * example + shift
        example = example if whole else example.view(1, heads, width)
        up, down = _run(norm, example, name), _run(norm, -example, name)
        scale = ((up - down) / 2 / example)[0] * (1 + eps) ** 0.5
        shift = ((up + down) / 2)[0]
        if centres is not None:
            return NormFormula(centres, whole, eps, scale, shift)
        expected = _run(norm, tokens.flatten(-2) if whole else tokens, name).view(tokens.shape)
        for is_centred in (False, True):
            formula = NormFormula(is_centred, whole, eps, scale, shift)
            error = (formula(tokens) - expected).abs().max()
            if float(error) <= 2e-2 * float(expected.abs().max()):
                return formula
    raise RuleError(
        f"{name}: {type(norm).__name__} is neither a layer norm nor an RMS norm, so space='logits' cannot pass a force "
        "through it; exclude the layer with match=..., or choose space='sphere'"
    )


def _run(norm: nn.Module, x: Tensor, name: str) -> Tensor:
    try:
        result: Tensor = norm(x)
    except Exception as error:
        kind, shape = type(norm).__name__, tuple(x.shape)
        raise RuleError(
            f"{name}: {kind} failed on tokens of shape {shape}: {error}. space='logits' needs a norm of one "
            "argument; exclude the layer with match=..., or choose space='sphere'"
        ) from error
    return result


def _eps(norm: nn.Module, dtype: torch.dtype) -> float:
    for module in norm.modules():  # StableLM has a list of norms, one for each head
        for name in ("eps", "variance_epsilon", "epsilon"):
            if isinstance(value := getattr(module, name, None), float):
                return value
    return torch.finfo(dtype).eps  # default of torch's RMSNorm

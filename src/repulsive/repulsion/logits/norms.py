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
        offset: scale minus the module's weight if it is the same number for all features, 0 or 1; else None.
    """

    centres: bool
    whole: bool
    eps: float
    scale: Tensor
    shift: Tensor
    offset: float | None = None

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
        return self.centres, self.whole, self.eps, tuple(self.scale.shape), self.scale.dtype, self.shift.dtype


def stack_formulas(norms: Sequence[NormFormula]) -> NormFormula:
    """Join the formulas of L layers of one kind to one formula for [L, N, M, d]."""
    scale, shift = (torch.stack([getattr(norm, name) for norm in norms]).unsqueeze(1) for name in ("scale", "shift"))
    return replace(norms[0], scale=scale, shift=shift)


def formula_of(norm: nn.Module, tokens: Tensor, name: str, earlier: NormFormula | None = None) -> NormFormula:
    """Derive the formula of a norm module.

    Args:
        norm: the norm module.
        tokens: projected tokens [N, M, d], to check the first formula; the check waits for all work of a GPU.
        name: name of the projection, for the error message.
        earlier: an earlier formula of this norm, of which only scale and shift may have changed.

    Raises:
        RuleError: the module is neither a layer norm nor an RMS norm.
    """
    with torch.no_grad():
        if earlier is None:
            return _checked_formula(norm, tokens, name)
        if next(norm.parameters(), None) is None:
            return earlier
        if earlier.offset is None:
            scale, shift = _measured(norm, tokens, name, earlier.whole, earlier.eps)
            return replace(earlier, scale=scale, shift=shift)
        # Copies, because sharded parameters are whole only in the forward pass.
        scale = (norm.weight.detach() + earlier.offset).expand(earlier.scale.shape)  # type: ignore[operator]
        bias = getattr(norm, "bias", None)
        shift = earlier.shift if bias is None else bias.detach().clone().expand(earlier.shift.shape)
        return replace(earlier, scale=scale, shift=shift)


def _checked_formula(norm: nn.Module, tokens: Tensor, name: str) -> NormFormula:
    heads, width = tokens.shape[-2:]
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    whole = weight is not None and weight.ndim == 1 and weight.numel() == heads * width and heads > 1
    eps = _eps(norm, tokens.dtype)
    scale, shift = _measured(norm, tokens, name, whole, eps)
    expected_shift = torch.zeros_like(shift) if bias is None else bias.detach()
    offsets = [] if weight is None else [o for o in (0.0, 1.0) if _are_close(weight.detach() + o, scale, scale)]
    offset = offsets[0] if offsets and _are_close(expected_shift, shift, scale) else None
    expected = _run(norm, tokens.flatten(-2) if whole else tokens, name).view(tokens.shape)
    for is_centred in (False, True):
        formula = NormFormula(is_centred, whole, eps, scale, shift, offset)
        error = (formula(tokens) - expected).abs().max()
        if float(error) <= 2e-2 * float(expected.abs().max()):
            return formula
    raise RuleError(
        f"{name}: {type(norm).__name__} is neither a layer norm nor an RMS norm, so space='logits' cannot pass a force "
        "through it; exclude the layer with match=..., or choose space='sphere'"
    )


def _measured(norm: nn.Module, tokens: Tensor, name: str, whole: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Measure scale and shift of a norm on an example, [M, d] each, or [M d] if `whole`."""
    heads, width = tokens.shape[-2:]
    example = tokens.new_ones(1, heads * width)
    example[:, 1::2] = -1  # mean 0 and variance 1, so a norm returns scale * example + shift
    example = example if whole else example.view(1, heads, width)
    up, down = _run(norm, example, name), _run(norm, -example, name)
    return ((up - down) / 2 / example)[0] * (1 + eps) ** 0.5, ((up + down) / 2)[0]


def _are_close(one: Tensor, other: Tensor, scale: Tensor) -> bool:
    return one.shape[-1:] == other.shape[-1:] and float((one - other).abs().max()) <= 1e-2 * float(scale.abs().max())


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

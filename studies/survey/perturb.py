"""Check proved heads without autograd: change the rows of one head, and find the head that changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.diagnostics.hooks.calling import call
from repulsive.heads.layout import HeadGroup
from repulsive.heads.trace.recorder import undispatched

MOST = 9  # groups of a model that are checked


class _Operands(TorchFunctionMode):
    """Record the inputs of every softmax and every scaled dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:
                return undispatched(func)(*args, **kwargs)
        if name == "softmax":
            scores = args[0] if args else kwargs["input"]
            self.calls.append({"q": scores.detach().clone(), "k": scores.detach().clone()})
        elif name == "scaled_dot_product_attention":
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            self.calls.append({part[0]: _dense(given[part]) for part in ("query", "key", "value")})
        return func(*args, **kwargs)


def _dense(tensor: Tensor) -> Tensor:
    """Copy a tensor; copy a nested one [B, H, *, d] as all its tokens, [tokens, H, d]."""
    return (tensor.transpose(1, 2).values() if tensor.is_nested else tensor).detach().clone()


def contradictions(model: nn.Module, inputs: Any, groups: Sequence[HeadGroup]) -> tuple[int, list[str]]:
    """Number of checked groups, and names of those whose first and last head change the same positions."""
    before = _run(model, inputs)
    if not _is_equal(before, _run(model, inputs)):
        return 0, []  # a model that draws random numbers from elsewhere changes by itself
    checked, wrong = 0, []
    for group in [group for group in groups if group.num_heads > 1][:MOST]:
        touched = [_touched(model, inputs, group, head, before) for head in (0, group.num_heads - 1)]
        if touched[0] is None or touched[1] is None or touched[0].shape != touched[1].shape:
            continue
        checked += 1
        if bool((touched[0] & touched[1]).any()):
            wrong.append(group.name)
    return checked, wrong


def _is_equal(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(old[part], new[part]) for old, new in zip(first, second, strict=True) for part in old
    )


def _touched(
    model: nn.Module, inputs: Any, group: HeadGroup, head: int, before: list[dict[str, Tensor]]
) -> Tensor | None:
    """Positions (all axes but the last) that change in the first call that changes; None if no call does."""
    parameters = [(part, part.parameter().detach().clone()) for part in group.slices]
    with torch.no_grad():
        for part, _ in parameters:
            features = part.parameter().movedim(part.axis, 0)
            features[part.rows[head]] += 0.3 * features[part.rows[head]].std() + 0.1
        after = _run(model, inputs)
        for part, value in parameters:
            part.parameter().copy_(value)
    for old, new in zip(before, after, strict=True):
        if any(not torch.equal(old[part], new[part]) for part in old):
            if group.part not in old:
                return None
            changed: Tensor = (old[group.part] != new[group.part]).any(-1)
            return changed if bool(changed.any()) else None
    return None


def _run(model: nn.Module, inputs: Any) -> list[dict[str, Tensor]]:
    watch = _Operands()
    torch.manual_seed(0)
    random.seed(0)
    with torch.no_grad(), watch:
        call(model, inputs)
    return watch.calls

"""Check proved heads without autograd: change the rows of one head and see which head of an attention call changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.heads.layout import HeadGroup
from repulsive.heads.trace.recorder import undispatched


class _Operands(TorchFunctionMode):
    """Notes what enters every softmax and every scaled dot-product attention."""

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
            self.calls.append({part[0]: given[part].detach().clone() for part in ("query", "key", "value")})
        return func(*args, **kwargs)


def contradictions(model: nn.Module, inputs: Any, groups: Sequence[HeadGroup], most: int = 9) -> tuple[int, list[str]]:
    """How many groups could be checked, and the names of those whose first and last head touch the same places."""
    before = _run(model, inputs)
    checked, wrong = 0, []
    for group in [group for group in groups if group.num_heads > 1][:most]:
        touched = [_touched(model, inputs, group, head, before) for head in (0, group.num_heads - 1)]
        if touched[0] is None or touched[1] is None or touched[0].shape != touched[1].shape:
            continue
        checked += 1
        if bool((touched[0] & touched[1]).any()):
            wrong.append(group.name)
    return checked, wrong


def _touched(
    model: nn.Module, inputs: Any, group: HeadGroup, head: int, before: list[dict[str, Tensor]]
) -> Tensor | None:
    """Which places (all axes but the last) of the first call that changes do change; None where no call does."""
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
    with torch.no_grad(), watch:
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return watch.calls

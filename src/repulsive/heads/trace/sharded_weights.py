"""Gather the weights of a model that FSDP2 shards, for the time of a trace.

FSDP2 gathers and frees the weights of a module in forward and backward hooks. A trace computes as many gradients as its
example needs, and examples differ between ranks: a rank that gathers more often than the others hangs. So all weights
are gathered before the first forward pass. Until the end, the hooks of FSDP2 only cast inputs and outputs, and move
inputs to the device of the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.errors import UnsupportedWeights
from repulsive.heads.module_paths import clean
from repulsive.heads.sharded_tensors import is_sharded


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Gather all weights that FSDP2 shards, and shard them again at the end; does nothing to other models.

    Every rank must call this, because each sends its shards. A block inside another one does nothing.

    Args:
        model: the unwrapped model.

    Raises:
        UnsupportedWeights: a weight is tensor parallel, or sharded by `fully_shard` of a module that contains `model`.
    """
    with ExitStack() as stack, torch.inference_mode(False):
        for module in _sharded_modules(model):
            _without_fsdp_hooks(module, stack)
            stack.callback(module.reshard)
            module.unshard()
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                raise UnsupportedWeights(
                    f"{clean(name)}: a trace needs whole weights, and this one is tensor parallel or sharded with a "
                    "larger module; call find_heads(model, example_inputs) before the model is distributed, and pass "
                    "the result to repel as groups=..."
                )
        yield


def _sharded_modules(model: nn.Module) -> list[Any]:
    """List the modules on which `fully_shard` was called and whose hooks are in place."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # never imported: nothing is sharded
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return []
    return [
        m for m in model.modules() if isinstance(m, kind) and any(map(_is_fsdp_hook, m._forward_pre_hooks.values()))
    ]


def _is_fsdp_hook(hook: Callable[..., Any]) -> bool:
    own = getattr(hook, "__module__", "").startswith("torch.distributed.")
    return own and getattr(hook, "__name__", "") in ("_pre_forward", "_post_forward")


def _without_fsdp_hooks(module: Any, stack: ExitStack) -> None:
    """Replace the forward hooks of FSDP2 by casts until `stack` is closed."""
    state = module._get_fsdp_state()
    policy, device = state._mp_policy, state._device if state._device.type != "cpu" else None

    def cast_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _moved((args, kwargs), policy.param_dtype if policy.cast_forward_inputs else None, device)

    def cast_output(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _moved(output, policy.output_dtype, None)

    for hooks, cast in ((module._forward_pre_hooks, cast_inputs), (module._forward_hooks, cast_output)):
        for key, hook in hooks.items():
            if _is_fsdp_hook(hook):
                stack.callback(hooks.__setitem__, key, hook)
                hooks[key] = cast


def _moved(values: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Cast floating-point tensors to `dtype`, and move all tensors to `device`; None leaves them as they are."""
    from torch.distributed.utils import _apply_to_tensors  # enters the same containers as FSDP2, but not caches

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return values if dtype is None and device is None else _apply_to_tensors(move, values)

"""Wait for the next training pass of a model, and measure it while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.heads.call_arguments import named_inputs
from repulsive.heads.module_paths import is_compile_wrapper, is_compiled
from repulsive.heads.padding import decoder_mask
from repulsive.heads.trace.forward_pass import without_compilation
from repulsive.monitoring.measurement import Measurement
from repulsive.monitoring.recording import HeadRecorder, Pass


class TrainingPass:
    """Hooks that wait for the next training pass of a model and measure it.

    A pass is a call of a module that contains all attention layers, in training mode and with gradients. Padding is
    read from the masks that this module, and those inside it that contain all layers, are called with.

    Args:
        model: the model, wrapped or not.
        recorder: the hooks inside the pass.
        on_measured: called with the measurement after the pass.
    """

    def __init__(self, model: nn.Module, recorder: HeadRecorder, on_measured: Callable[[Measurement], None]) -> None:
        self._model, self._recorder, self._on_measured = model, recorder, on_measured
        self._hooks: ExitStack | None = None  # while a pass is awaited
        self._running: tuple[ExitStack, Pass] | None = None  # while a pass is measured
        self._outer: nn.Module | None = None  # the module whose call is measured
        self._inputs: dict[str, Any] = {}
        self._step = 0
        self.missed = 0  # steps in a row without a pass
        self._may_be_compiled = False  # by a wrapper that the monitor does not know

    @property
    def is_awaited(self) -> bool:
        return self._hooks is not None

    def wait(self, step: int) -> None:
        """Measure the next training pass, as that of `step`."""
        self._step = step
        if self._hooks is not None:
            return
        hooks = self._hooks = ExitStack()
        path = self._recorder.path
        for module in path:
            hooks.callback(module.register_forward_pre_hook(_Hook(self, "_before"), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(_Hook(self, "_after"), always_call=True).remove)
        wrapper = _compile_wrapper(self._model)
        if wrapper is not None:
            hooks.callback(wrapper.register_forward_pre_hook(_Hook(self, "_before_compiled")).remove)
        elif self._may_be_compiled or any(is_compiled(module) for module in _containing_modules(self._model, path[-1])):
            hooks.enter_context(without_compilation())

    def count_missed(self) -> None:
        """Count a step that ended without a pass, and stop waiting; compiled code may have skipped the hooks."""
        self.cancel()
        self.missed += 1
        self._may_be_compiled = True

    def cancel(self) -> None:
        """Remove all hooks; a pass that is being measured is discarded."""
        running, self._running = self._running, None
        if running is not None:
            running[0].close()
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()
        self._inputs = {}

    def start(self, batch: Mapping[str, Any]) -> None:
        """Start measuring a pass now; `finish` ends it. For frameworks that do not call the model as a module."""
        stack = ExitStack()
        stack.enter_context(without_compilation())
        self._running = stack, stack.enter_context(self._recorder.recording(batch, self._step))

    def finish(self) -> None:
        """Finish the pass that is being measured, if any, and report it. If no layer ran, the next pass is awaited."""
        if self._running is None:
            return
        stack, result = self._running
        stack.close()
        self._running, self._inputs = None, {}
        measurement = result.finish()
        if measurement.layers:
            self.cancel()
            self.missed = 0
            self._on_measured(measurement)

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not _is_training(module):
            return
        inputs = named_inputs(module, args, kwargs)
        if (mask := decoder_mask(module, inputs)) is not None:
            inputs["decoder_attention_mask"] = mask
        for name, value in inputs.items():
            if value is not None and (name not in self._inputs or (_is_matrix(value) > _is_matrix(self._inputs[name]))):
                self._inputs[name] = value  # a mask [B, T] rather than its expanded form
        if self._running is None:
            self._outer = module
            earlier = set(module._forward_pre_hooks)
            self.start(self._inputs)
            if any(module is layer.attention for layer in self._recorder.layers):
                _call_new_hooks(module, earlier, args, kwargs)

    def _after(self, module: nn.Module, _args: object, result: Any) -> None:
        if torch.compiler.is_compiling() or self._running is None or module is not self._outer:
            return
        if result is None:  # the pass failed
            self._running[0].close()
            self._running, self._inputs = None, {}
        else:
            self.finish()

    def _before_compiled(self, module: nn.Module, _args: object) -> None:
        if _is_training(module) and self._hooks is not None:
            self._hooks.enter_context(without_compilation())


def _call_new_hooks(module: nn.Module, earlier: set[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the forward pre-hooks that were added during this call of a module; torch runs them from the next call on.

    They only read, so their results are not used.
    """
    for number, hook in list(module._forward_pre_hooks.items()):
        if number not in earlier:
            hook(module, args, kwargs) if number in module._forward_pre_hooks_with_kwargs else hook(module, args)


class _Hook:
    """Module hook that calls a method of a `TrainingPass`. In a copied or unpickled module the hook does nothing."""

    def __init__(self, owner: TrainingPass | None, method: str) -> None:
        self.owner, self.method = owner, method

    def __call__(self, *args: Any) -> None:
        if self.owner is not None:
            getattr(self.owner, self.method)(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None, self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self.method)


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2


def _is_training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _compile_wrapper(model: nn.Module) -> nn.Module | None:
    """Find the wrapper that `torch.compile` put around a model, below data-parallel wrappers."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        model = model.module  # type: ignore[assignment]
    return model if is_compile_wrapper(model) else None


def _containing_modules(model: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """List the modules of a model that contain another one, wrappers included."""
    return [module for module in model.modules() if any(each is inner for each in module.modules())]


def is_first_rank() -> bool:
    """Check whether this process measures: rank 0, or the only process."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0

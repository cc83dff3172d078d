"""Repulsion in a training loop on Accelerate: `repel` for prepared models, with checkpoints.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    handle = repel_prepared(accelerator, model, optimizer, rule=SVGD(alpha=0.01))

The loop's `accelerator.clip_grad_norm_` runs before the rule. For the other order call `handle.apply()` before it;
the handle uses the accelerator's gradient scaler. Steps that Accelerate skips, during gradient accumulation or after
an overflow, are neither changed nor counted.
"""

from __future__ import annotations

import json
import weakref
from itertools import count
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from repulsive.errors import StateError, warn_user
from repulsive.extras import install_command
from repulsive.integrations.force_files import with_forces, write_forces
from repulsive.repulsion import Handle, repel
from repulsive.repulsion.arguments import RuleAndSettings

try:
    from accelerate import Accelerator
except ImportError as error:
    command = install_command("accelerate")
    raise ImportError(f"repulsive.integrations.accelerate needs accelerate: {command}") from error

# accelerator -> the handle of each file, by its number; the accelerator keeps handles alive
_handles: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[Handle]]] = weakref.WeakKeyDictionary()


def repel_prepared(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, **settings: Unpack[RuleAndSettings]
) -> Handle:
    """Call `repel`, and save and load its state with `accelerator.save_state` and `accelerator.load_state`.

    The state is `repulsive.json` in the folder of the checkpoint, `repulsive_1.json` for a second handle, and so on.
    With `space="logits"`, forces that are still in use are in a file of the same name with the suffix `.forces`.
    Attach several handles in the same order when you resume. A removed handle is neither saved nor restored; the next
    handle takes its file.

    Args:
        accelerator: the accelerator of the training.
        model: the model, prepared or not.
        optimizer: its optimizer, prepared or not.
        settings: keyword arguments of `repel`; `rule` may be a name, such as "sphere".

    Returns:
        The handle of `repel`.

    Raises:
        RepulsiveError: as in `repel`; `accelerator.load_state` raises StateError if the file is damaged.
    """
    handle = repel(accelerator.unwrap_model(model), optimizer, **settings)
    handle.scaler = accelerator.scaler  # gradients stay scaled until `accelerator.clip_grad_norm_`
    _file_name(accelerator, handle)

    def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        on_each_node = accelerator.project_configuration.save_on_each_node
        is_writer = accelerator.is_local_main_process if on_each_node else accelerator.is_main_process
        if handle.attached and is_writer:
            path = Path(output_dir, _file_name(accelerator, handle))
            path.write_text(json.dumps(handle.state_dict(tensors=False), indent=2) + "\n", encoding="utf-8")
            write_forces(path.with_suffix(".forces"), [handle.state_dict()])

    def load(models: list[nn.Module], input_dir: str) -> None:
        if not handle.attached:
            return
        path = Path(input_dir, _file_name(accelerator, handle))
        if path.is_file():
            (state,) = with_forces(path.with_suffix(".forces"), [_read(path)])
            handle.load_state_dict(state)
        else:
            warn_user(
                f"{input_dir} has no {path.name}: the checkpoint was made without repulsion. Steps of repulsion and "
                f"schedules continue from step {handle.steps}"
            )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return handle


def _file_name(accelerator: Accelerator, handle: Handle) -> str:
    """Return the file of an attached handle: the one it has, or the first that no attached handle has."""
    handles = _handles.setdefault(accelerator, {})
    number = next((one for one, own in handles.items() if own() is handle), None)
    if number is None:  # a new handle, or one that was removed and attached again when another had its file
        number = next(one for one in count() if not _is_attached(handles.get(one)))
        handles[number] = weakref.ref(handle)
    return f"repulsive_{number}.json" if number else "repulsive.json"


def _is_attached(reference: weakref.ref[Handle] | None) -> bool:
    handle = None if reference is None else reference()
    return handle is not None and handle.attached


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StateError(f"{path}: the state is damaged ({error}); load an earlier checkpoint") from error

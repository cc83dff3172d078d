"""Repulsion in a loop of your own on Accelerate: `repel` that knows wrappers and checkpoints.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    handle = repel_prepared(accelerator, model, optimizer, rule=SVGD(alpha=0.01))

`accelerator.clip_grad_norm_` in the loop comes before the rule; for the other order call `handle.apply()` before it,
which knows the accelerator's scaler. Steps that Accelerate leaves out, while it accumulates gradients or after an
overflow, are neither changed nor counted.
"""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from repulsive.repulsion import Handle, repel

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        'repulsive.integrations.accelerate needs accelerate: pip install "repulsive[accelerate]"'
    ) from error

_files_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # accelerator -> states it carries


def repel_prepared(accelerator: Accelerator, model: nn.Module, optimizer: Any, **settings: Any) -> Handle:
    """`repel`, whose state travels with `accelerator.save_state` and `accelerator.load_state`.

    The state is `repulsive.json` in the checkpoint's folder; that of a second handle is `repulsive_1.json`, and so on:
    attach several in the same order when you resume. A removed handle is neither saved nor restored.

    Args:
        accelerator: what prepares the training.
        model: the model, prepared or yet to be.
        optimizer: its optimiser, prepared or yet to be.
        settings: the arguments of `repel`, by name; `rule` may be a name, such as "sphere".

    Returns:
        The handle of `repel`.

    Raises:
        RepulsiveError: as in `repel`.
    """
    handle = repel(accelerator.unwrap_model(model), optimizer, **settings)
    handle.scaler = accelerator.scaler  # it is `accelerator.clip_grad_norm_` that unscales gradients
    number = _files_of.get(accelerator, 0)
    _files_of[accelerator] = number + 1
    name = f"repulsive_{number}.json" if number else "repulsive.json"

    def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        on_each_node = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if on_each_node else accelerator.is_main_process
        if handle.attached and writes:
            Path(output_dir, name).write_text(json.dumps(handle.state_dict(), indent=2) + "\n", encoding="utf-8")

    def load(models: list[nn.Module], input_dir: str) -> None:
        if not handle.attached:
            return
        path = Path(input_dir, name)
        if path.is_file():
            handle.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        else:
            warnings.warn(
                f"{input_dir} has no {name}: it was made without repulsion, whose steps, and any schedule, go on from "
                f"{handle.steps}",
                stacklevel=3,
            )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return handle

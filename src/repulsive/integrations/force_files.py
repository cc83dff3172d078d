"""Forces between logits in a safetensors file, beside a JSON file with the rest of the states of handles.

Its suffix is `.forces`: many programs read all files named `*.safetensors` in a checkpoint as weights of the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import StateError


def write_forces(path: Path, states: Sequence[dict[str, Any]]) -> None:
    """Write the forces in the states of handles; remove the file if they have none.

    Args:
        path: the file to write.
        states: results of `Handle.state_dict`.
    """
    tensors = {
        f"{number}/{layer}/{index}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for number, state in enumerate(states)
        for layer, forces in state.get("forces", {}).items()
        for index, tensor in enumerate(forces)
    }
    if not tensors:
        path.unlink(missing_ok=True)  # an earlier checkpoint in the same folder may have had forces
        return
    from safetensors.torch import save

    path.write_bytes(save(tensors, metadata={"steps": _steps(states)}))  # `save_file` ignores the umask


def with_forces(path: Path, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states with the forces in a file; unchanged if there is no file, or one of another step.

    Args:
        path: the file that `write_forces` has written.
        states: results of `Handle.state_dict(tensors=False)` from the same checkpoint.

    Raises:
        StateError: the file is damaged.
    """
    if not path.is_file() or not all(isinstance(state, dict) for state in states):
        return list(states)  # `Handle.load_state_dict` refuses states that are not dictionaries
    from safetensors import SafetensorError, safe_open

    result = [dict(state) for state in states]
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("steps") != _steps(states):
                return result
            names = [(key, *_parts(key)) for key in file.keys()]  # noqa: SIM118  # not a dictionary
            for key, number, layer, _ in sorted(names, key=lambda one: one[3]):
                result[number].setdefault("forces", {}).setdefault(layer, []).append(file.get_tensor(key))
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise StateError(
            f"{path}: the forces are damaged ({error}); load an earlier checkpoint, or delete this file to resume with "
            "new forces"
        ) from error
    return result


def _parts(key: str) -> tuple[int, str, int]:
    number, _, rest = key.partition("/")
    layer, _, index = rest.rpartition("/")
    return int(number), layer, int(index)


def _steps(states: Sequence[dict[str, Any]]) -> str:
    return json.dumps([state.get("steps") for state in states])

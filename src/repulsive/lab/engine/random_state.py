"""Seed, save and restore every random number generator that a training may use."""

from __future__ import annotations

import importlib
import random
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy; custom tasks may use the last two."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Read the state of the generators of Python, NumPy, torch and every GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := _numpy()) is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators to a state from `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := _numpy()) is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):  # the checkpoint may have more GPUs
            torch.cuda.set_rng_state(saved, device)


def _numpy() -> Any:
    """Import NumPy; None if it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None

"""Reset Accelerate's global state (device, precision) after each test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _reset_accelerate() -> Iterator[None]:
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

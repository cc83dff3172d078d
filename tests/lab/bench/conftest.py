"""Settings of the tests of measurements."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def freeze_again() -> Iterator[None]:
    """Exclude modules and tests from garbage collection once more: measurements end with `gc.unfreeze`."""
    yield
    gc.freeze()

"""Settings of all tests: `gpu` tests are skipped where there is no CUDA device, and output has no fixed width."""

import gc
import importlib.util
import os
from collections.abc import Iterator

# Some virtual machines report AMX and do not allow it: the first bfloat16 product kills the process. No test needs it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from tests.interpreter import remember_builtins

if not torch.cuda.is_available():
    # The kernels' CPU twins run under Triton's interpreter, which must be chosen before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        remember_builtins()

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers: tables would be wrapped

# As `make test` has it: runs side by side have a thread each, and those they are compared with have to have as many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude modules and tests, which stay until the end, from garbage collection: to visit them all takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that are left at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)

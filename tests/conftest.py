"""Settings of all tests: what a test draws, compiles and prints does not depend on the tests before it.

`gpu` tests are skipped where there is no CUDA device.
"""

import gc
import importlib.util
import os
import random
import sys
import zlib
from collections.abc import Iterator

# Some virtual machines report AMX and do not allow it: the first bfloat16 product kills the process. No test needs it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.interpreter import remember_builtins

if not torch.cuda.is_available():
    # The kernels' CPU twins run under Triton's interpreter, which must be chosen before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        remember_builtins()

# They change widths and colours of tables and help texts. pytest-xdist sets COLUMNS, and GitHub sets GITHUB_ACTIONS.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)

# As `make test` has it: runs side by side have a thread each, and those they are compared with have to have as many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# The same examples in every run, however slow the machine is.
settings.register_profile(
    "steady", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude modules and tests, which stay until the end, from garbage collection: to visit them all takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def seed_generators(name: str) -> None:
    """Seed the global generators. Which tests have drawn from them before depends on pytest-xdist."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
    seed_generators(fixturedef.argname)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Start from seeded generators and without compiled code: torch compiles a function only a few times."""
    seed_generators("test")
    try:
        return (yield)
    finally:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that are left at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)

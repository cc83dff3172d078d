"""Triton kernels are compiled for a GPU ahead of time: the interpreter accepts code that the compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from repulsive.repulsion.backends import launch_settings

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "REPULSIVE_KERNELS": ""}
    command = [sys.executable, "-m", "tests.repulsion.compile_kernels"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    compiled = [name for name, *_ in lines]
    kernels = {"gram_kernel", "solve_kernel", "combine_kernel", "pack_kernel", "unpack_kernel", "step_noise_kernel"}
    if launch_settings.has_tuples():
        kernels |= {"column_gram_kernel", "column_combine_kernel"}
    assert set(compiled) == kernels
    assert compiled.count("solve_kernel") >= 20
    of_rows = [int(wide) for name, _, wide in lines[-12:] if name != "solve_kernel"]
    assert of_rows and all(of_rows), lines[-12:]  # 16 bytes at once from heads side by side in rows

"""Freed memory is kept in the process, unless the user has set the thresholds of malloc."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from repulsive.lab.engine.freed_memory import keep_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(100_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

changed = keep_freed_memory()
count_faults()
print(changed, count_faults())
"""


def run(**settings):
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    command = [sys.executable, "-c", PROGRAM]
    changed, faults = subprocess.check_output(command, env=kept | settings, text=True).split()
    return changed == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_large_block_gets_the_pages_of_the_block_before():
    changed, faults = run()
    assert changed and faults < 1000  # 24,000 pages of 4 kB


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_settings_of_the_user_stay(name):
    assert not run(**{name: "131072"})[0]

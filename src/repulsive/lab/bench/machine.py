"""Describe the machine of a measurement: processor or GPU, threads, package versions, date."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

from repulsive.environment.versions import package_versions

PACKAGES = ("torch", "transformers", "triton")  # step times depend on them


def machine_name(device: str) -> str:
    """Return the name of the GPU, or the architecture of the CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} CPU"


def describe(device: str) -> dict[str, Any]:
    """Describe machine, threads, versions and date, as plain values for JSON."""
    facts: dict[str, Any] = {
        "machine": machine_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": package_versions(PACKAGES),
        "date": date.today().isoformat(),
    }
    if device == "cuda":
        facts["device_bytes"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return facts


def free_bytes(device: str) -> int | None:
    """Return the free memory in bytes; None if it is unknown."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kilobytes[0]) if kilobytes else None


def allocated_bytes(device: str) -> int:
    """Return the bytes of GPU memory that tensors use; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def process_peak_bytes() -> int | None:
    """Return the peak memory of this process in bytes; None on systems without `getrusage`."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else 1024 * peak

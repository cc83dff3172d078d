"""Find and prove the heads of one model, and describe the result as plain values."""

from __future__ import annotations

import hashlib
import re
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch

import repulsive.heads
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import clean, module_of
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.trace.infer import Completed, complete
from repulsive.heads.trace.mixing import CHANNELS


def examine(name: str, model: torch.nn.Module, inputs: Any, completed: Completed | None = None) -> dict[str, Any]:
    """Find and prove the heads of a model, or report those of `completed`."""
    start = time.perf_counter()
    groups, misses = heads_from_table(model)
    completed = completed or complete(model, inputs, groups)
    refused = [r for r in completed.reports if r.status == "wrong"]
    verified = [r for r in completed.reports if r.status == "verified"]
    inferred = [g.name for g in completed.groups if g.family == "inferred"]
    if refused:
        return outcome(name, "refused", f"{len(refused)} groups: {refused[0]}"[:300])
    if not verified:
        looks = completed.misses or misses or _looks_like_attention(model)
        is_missed = bool(completed.groups) or (bool(looks) and completed.has_attention)
        note = "; ".join(f"{k}: {v}" for k, v in {**completed.misses, **misses}.items())
        if completed.groups:
            note = f"untraced: {', '.join(completed.untraced)}; {note}"
        if looks and not is_missed:
            note = f"no dot-product attention over tokens; {note}" if note else "no product of queries and keys"
        return outcome(name, "missed" if is_missed else "none", note[:300])
    mixed = [report for report in completed.mixed if report.note != CHANNELS]
    status = "partly" if completed.untraced or mixed else "inferred" if inferred else "table"
    notes = {r.note for r in verified if r.note} | {f"untraced: {name}, ..." for name in completed.untraced[:1]}
    notes |= {f"{report.name} left out: {report.note}" for report in mixed[:1]}
    return outcome(
        name,
        status,
        "; ".join(sorted(notes)),
        groups=len(completed.groups),
        verified=len(verified),
        inferred=len(inferred),
        leak=max(r.leak for r in verified),
        families=sorted({g.family for g in completed.groups}),
        classes=proved_classes(model, completed),
        mixed=len(mixed),
        unresolved=completed.misses,
        inputs=sorted(inputs) if isinstance(inputs, dict) else [],
        seconds=round(time.perf_counter() - start, 2),
    )


def proved_classes(model: torch.nn.Module, completed: Completed) -> list[str]:
    """List "family module.Class" of every attention module whose groups are all proved as the table has them."""
    modules = {clean(name): module for name, module in model.named_modules()}
    groups: dict[str, list[HeadGroup]] = {}
    for group in completed.groups:
        groups.setdefault(module_of(group), []).append(group)
    mixed = {report.name.rpartition(".")[0] for report in completed.mixed}
    return sorted(
        {
            f"{each[0].family} {kind.__module__}.{kind.__qualname__}"
            for name, each in groups.items()
            if name not in mixed and all(g.proof == "proved" and g.family != "inferred" for g in each)
            for kind in [type(modules[name])]
        }
    )


def _looks_like_attention(model: torch.nn.Module) -> bool:
    return any("attention" in type(m).__name__.lower() for m in model.modules())


def outcome(name: str, status: str, note: str, **more: Any) -> dict[str, Any]:
    """Return the result of one architecture as plain values."""
    return {"architecture": name, "status": status, "note": note, "code": code_version(), **more}


@cache
def code_version() -> str:
    """A digest of the package `heads`, which identifies the code that made a cached result."""
    files = sorted(Path(repulsive.heads.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def error_text(error: BaseException) -> str:
    """The message of an error and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = re.sub(r"/\S*/", "", str(error))  # without local paths
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"[:300]

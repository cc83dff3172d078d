"""Exact classes of other packages whose signature has been proved: built, run and traced by the survey."""

from __future__ import annotations

# (package, signature) -> class names, or "module.Class" where the package has several classes of one name.
SURVEYED: dict[tuple[str, str], frozenset[str]] = {
    ("repulsive", "q_proj/k_proj/v_proj"): frozenset(["Attention", "GraphAttention"]),
}

"""The trained models of the demo, for `repulsive inspect`; the current folder must be that of the demo.

repulsive inspect repulsive.lab.demo.trained:repelled --example repulsive.lab.demo.trained:windows
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from repulsive.errors import RunError
from repulsive.lab.demo.runs import SUMMARY, TEXT, load_model
from repulsive.lab.demo.settings import PLAIN, REPELLED
from repulsive.lab.demo.text import split
from repulsive.lab.demo.train import held_out_sample
from repulsive.lab.engine.files import read_json
from repulsive.lab.systems.lm.model import Decoder


def plain() -> Decoder:
    """Load the plain model of the seed that the page shows."""
    return _model(PLAIN)


def repelled() -> Decoder:
    """Load the repelled model of the seed that the page shows."""
    return _model(REPELLED)


def windows() -> Tensor:
    """Read the held-out windows on which the demo compares heads, int64 [16, 128]."""
    length = plain().config.length
    return held_out_sample(split(Path(TEXT).read_text(encoding="utf-8"))[1], length)


def _model(arm: str) -> Decoder:
    summary = read_json(Path(SUMMARY))
    if not isinstance(summary, dict):
        raise RunError(f"no {SUMMARY} in the current folder; run `repulsive demo`, and change to its folder")
    return load_model(Path(), arm, summary["shown_seed"])

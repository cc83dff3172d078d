"""Verdicts of the survey of packages, its table, and its check by perturbation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.survey import packages
from studies.survey.perturb import contradictions
from torch import Tensor, nn

from repulsive.heads import find_heads, heads_by_hand


class Attention(nn.Module):
    """Two heads in `qkv`; if `is_random`, with inputs that change between runs whatever the seed is."""

    def __init__(self, is_random: bool = False) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.is_random = 2, nn.Linear(8, 24), is_random

    def forward(self, x: Tensor) -> Tensor:
        x = x + (random.SystemRandom().random() if self.is_random else 0.0)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_true_heads_are_not_contradicted_and_wrong_ones_are() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 8)
    assert contradictions(model, (x,), find_heads(model, x)) == (3, [])
    wrong = heads_by_hand(model, {"qkv": ("qkv dim head", 2)})
    assert contradictions(model, (x,), wrong) == (3, [group.name for group in wrong])


def test_a_model_that_changes_by_itself_is_not_checked() -> None:
    torch.manual_seed(0)
    model, x = Attention(is_random=True), torch.randn(2, 5, 8)
    assert contradictions(model, (x,), find_heads(model, x)) == (0, [])


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ({"status": "table", "verified": 3, "groups": 3, "mixed": 0}, "proved"),
        ({"status": "table", "verified": 3, "groups": 3, "mixed": 0, "contradicted": ["q"]}, "wrong"),
        ({"status": "partly", "verified": 1, "groups": 1, "mixed": 2}, "in part"),
        ({"status": "partly", "verified": 3, "groups": 6, "mixed": 0}, "in part"),
        ({"status": "missed", "verified": 0, "groups": 3, "mixed": 0}, "refused"),
        ({"status": "none", "verified": 0, "groups": 0, "mixed": 0}, "no heads"),
        ({"status": "stopped"}, "not run"),
    ],
)
def test_verdict(result: dict[str, Any], verdict: str) -> None:
    assert packages.verdict(result) == verdict


def test_the_share_is_of_models_that_run_and_have_heads(tmp_path: Path) -> None:
    verdicts = ["proved", "proved", "in part", "refused", "no heads", "not run"]
    results = [
        {"architecture": f"model {i}", "package": "timm", "version": "1.0", "verdict": verdict, "note": ""}
        for i, verdict in enumerate(verdicts)
    ]
    packages.write(tmp_path, results)
    assert "| timm | 1.0 | 6 | 2 | 1 | 1 | 1 | 1 | 0 | 2 of 4 (50 %) |" in (tmp_path / "packages.md").read_text()

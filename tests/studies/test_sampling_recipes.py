"""The study of sampling recipes: its page, and paired differences with known answers."""

import json
from pathlib import Path

import pytest

from tests.scripts import study

RESULTS = Path(__file__).resolve().parents[2] / "results" / "sampling"


@pytest.fixture(scope="module")
def recipes():
    with study("studies.sampling.recipes") as module:
        yield module


def test_the_page_agrees_with_the_stored_numbers(recipes):
    data = json.loads((RESULTS / "recipes.json").read_text())
    command = "run: python -m studies.sampling.recipes --tables"
    assert recipes.describe(data) == (RESULTS / "recipes.md").read_text(encoding="utf-8"), command


def test_every_recipe_has_the_same_seeds(recipes):
    runs = json.loads((RESULTS / "recipes.json").read_text())["runs"]
    seeds = {method: [run["seed"] for run in runs if run["method"] == method] for method in recipes.METHODS}
    assert len(seeds["ma"]) >= 3
    assert all(own == seeds["ma"] for own in seeds.values())


def test_differences_are_paired_by_seed(recipes):
    plain = [{"ece15": 0.1}, {"ece15": 0.5}]
    other = [{"ece15": 0.2}, {"ece15": 0.8}]  # +0.1 and +0.3: mean 0.2, standard error 0.1, t = 12.706
    assert recipes.paired(other, plain, "ece15") == "+0.2000 [-1.0706, +1.4706]"

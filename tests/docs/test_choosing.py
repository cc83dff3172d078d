"""Every number on the pages about settings and cost is in the file of results that its line cites."""

import json
import re
from pathlib import Path

import pytest
import torch

from repulsive import SVGD
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.systems.registry import open_recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"
COST = PAGE.with_name("cost.md")
RESULTS = PAGE.parents[1] / "results"
CITED = re.compile(r"\]\((\.\./results/[^)#]+)(?:#[^)]*)?\)")
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e-?\d+)?(?![\w.])")


def lines() -> list[str]:
    return [
        line for page in (PAGE, COST) for line in page.read_text(encoding="utf-8").splitlines() if CITED.search(line)
    ]


def stated(line: str) -> list[str]:
    """Numbers with a decimal point, without those in code and in links."""
    return NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line))


def in_file(number: str, held: list[float]) -> bool:
    """Whether a file holds a number that is printed so, as it is or in percent."""
    half = 0.5001 * 10.0 ** -len(number.split(".")[1])
    return any(abs(scale * value - float(number)) <= half for value in held for scale in (1, 100))


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[:40])
def test_the_numbers_of_a_line_are_in_the_files_it_cites(line):
    text = " ".join((PAGE.parent / link).read_text(encoding="utf-8") for link in CITED.findall(line))
    held = [float(number) for number in NUMBER.findall(text)]
    assert [number for number in stated(line) if not in_file(number, held)] == []


def test_a_number_that_is_not_there_is_seen():
    assert stated("| NLL -0.123 `ratio=0.03` ([x](../results/1.5.md)), 4.5 |") == ["0.123", "4.5"]
    assert in_file("0.12", [0.1234]) and in_file("12.3", [0.1234]) and not in_file("0.13", [0.1234])
    assert sum(bool(stated(line)) for line in lines()) > 15


@pytest.mark.parametrize(
    "name",
    [
        *(f"{data}/svgd-sphere" for data in ("multi30k", "iwslt14", "tatoeba", "europarl")),
        "multi30k/small-svgd-sphere",
        *(f"electra/{size}-svgd-sphere" for size in ("small", "tiny")),
    ],
)
def test_what_is_recommended_for_transformers_is_what_their_recipes_have(name):
    text = 'SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4)'
    recommended = SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4)
    assert f"for_transformers = {text}" in PAGE.read_text()
    rule = make_rule(open_recipe(name).method, num_data=100, total_steps=100)
    for setting in ("stepsize", "alpha", "ratio", "space", "smoothing", "act_every"):
        assert getattr(rule, setting) == getattr(recommended, setting), setting


def test_what_is_recommended_for_additive_attention_is_what_was_trained():
    settings = json.loads((RESULTS / "classification" / "paper_sizes.json").read_text())["yelp"]["arms"]
    changes = ["method.stepsize=30", *settings["cosine-smoothing"]["settings"]]
    trained = make_rule(open_recipe("yelp/cosine-smoothing", changes).method, num_data=100, total_steps=100)
    assert 'for_additive_attention = SVGD("heads", alpha=0.00169, kernel="cosine")' in PAGE.read_text()
    generator = torch.Generator().manual_seed(0)
    heads, gradients = torch.randn(2, 30, 40, dtype=torch.float64, generator=generator)  # 30 heads of 40 numbers
    recommended = SVGD("heads", alpha=0.00169, kernel="cosine")
    assert torch.equal(recommended.gradient(heads, gradients), trained.gradient(heads, gradients))

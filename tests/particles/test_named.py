"""Rules by name, and settings that would have no effect."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch

from repulsive.errors import RuleError
from repulsive.particles import RULES, SGLD, SPOS, SVGD, CosineLadder, KernelFree, rule_by_name
from repulsive.particles.bandwidths import released, released_lower
from repulsive.particles.schedules import Until

EXPECTED = {
    "recommended": SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4),
    "paper": SVGD(stepsize=0.1, alpha=0.01),
    "svgd": SVGD(),
    "spos": SPOS(alpha=0.01, temperature=0.01),
    "spos-paper": SPOS(alpha=0.01, temperature=1.0),
    "sgld": SGLD(),
    "sphere": SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4),
    "logits": SVGD("heads", Until(500, 0.01), space="logits"),
    "kernel-free": KernelFree(stepsize=0.1, alpha=0.01),
}


def test_every_name_is_the_rule_that_is_documented():
    assert {name: rule_by_name(name) for name in RULES} == EXPECTED


@pytest.mark.parametrize(("word", "meant"), [("shpere", "sphere"), ("SVGD", "svgd"), ("logit", "logits")])
def test_a_misspelt_name_is_suggested(word, meant):
    with pytest.raises(RuleError, match=f"unknown rule '{word}'; did you mean '{meant}'"):
        rule_by_name(word)


@pytest.mark.parametrize(("kind", "options"), [(SVGD, {}), (SPOS, {"alpha": 0.5}), (SVGD, {"alpha": math.sqrt})])
@pytest.mark.parametrize("ratio", [0.03, 0.1, math.sqrt])
def test_a_ratio_without_auto_is_an_error(kind, options, ratio):
    with pytest.raises(RuleError, match=r"ratio=.* has no effect without it; write .*alpha='auto'"):
        kind(ratio=ratio, **options)
    assert kind(alpha="auto", ratio=ratio).ratio == ratio


def test_the_default_ratio_prints_as_a_number():
    for rule in (SVGD(), SVGD(alpha="auto"), SPOS(), CosineLadder()):
        assert rule.ratio == 0.1 and "ratio=0.1" in repr(rule)
    assert SVGD(alpha="auto") == SVGD(alpha="auto", ratio=0.1)


def test_rules_can_be_changed_copied_and_pickled():
    assert dataclasses.replace(SVGD(), stepsize=1.0) == SVGD(1.0)
    for copied in (copy.deepcopy(SVGD()), pickle.loads(pickle.dumps(SVGD()))):
        assert copied == SVGD() and dataclasses.replace(copied, alpha=0.5) == SVGD(alpha=0.5)
    assert dataclasses.replace(SVGD(alpha="auto"), alpha=0.5) == SVGD(alpha=0.5)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SPOS(), 0.01),
        (SPOS(alpha=0.5), 0.5),
        (SPOS(alpha=2), 2.0),
        (dataclasses.replace(SPOS(), alpha=0.5), 0.5),
        (dataclasses.replace(SPOS(temperature=0.01), alpha=0.5), 0.01),
        (pickle.loads(pickle.dumps(SPOS(alpha=0.5))), 0.5),
        (SPOS(temperature=1.0), 1.0),
        (SPOS(alpha=0.0), 1.0),
        (SPOS(alpha="auto"), 1.0),
        (SPOS(alpha=math.sqrt), 1.0),
        (SPOS(noise="released"), 1.0),
        (SPOS(temperature=0.0), 0.0),
    ],
)
def test_the_noise_of_spos_has_the_temperature_of_its_interaction(rule, expected):
    assert rule.temperature == expected
    sigma = math.sqrt(2 * expected * rule.stepsize / (rule.beta * 0.1))
    assert abs(rule.noise_scale(0.1)) == pytest.approx(sigma)


@pytest.mark.parametrize("heads", [2, 3, 4, 12])
def test_the_lower_median_is_that_of_torch(heads):
    theta = torch.randn(5, heads, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(heads))
    d2 = torch.cdist(theta, theta).square()
    lower = torch.stack([torch.median(one) for one in d2]) / math.log(heads + 1)
    assert torch.equal(released_lower(d2), lower)
    even = heads % 2 == 0  # an even number of entries has two middle values
    assert bool((released_lower(d2) < released(d2)).all()) == even


def test_two_heads_have_no_lower_median():
    """Two of the four squared distances are zero, so the lower median is zero and the lower bound of h applies."""
    theta = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert released_lower(torch.cdist(theta, theta).square()) == 0
    assert SVGD(bandwidth="released-lower").gradient(theta, torch.ones(2, 2)).isfinite().all()


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: SVGD(space="shpere"), "sphere"),
        (lambda: SVGD(kernel="cosin"), "cosine"),
        (lambda: SVGD(bandwidth="realeased"), "released"),
    ],
)
def test_misspelt_words_are_suggested(make, meant):
    with pytest.raises(RuleError, match=f"did you mean '{meant}'"):
        make()

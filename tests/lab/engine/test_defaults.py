"""A setting that a recipe leaves out has the value that the library uses."""

import dataclasses
import inspect

import pytest

from repulsive import SGLD, SPOS, SVGD, repel
from repulsive.errors import RuleError
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.engine.recipe import Method
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.priors import Gaussian

OWN = {"rule", "schedule", "until", "penalty"}  # keys without a counterpart in the library


def library_defaults() -> dict[str, set]:
    """Key of [method] -> all values that it has by default in `repel` and the rules."""
    found: dict[str, set] = {"prior_std": {Gaussian().std}, "ratio": {SVGD(alpha="auto").ratio}}
    parameters = {name: p.default for name, p in inspect.signature(repel).parameters.items()}
    rules = [rule for rule in (SVGD(), SPOS(), SGLD()) if dataclasses.is_dataclass(rule)]
    for key in (field.name for field in dataclasses.fields(Method)):
        owners = [rule for rule in rules if hasattr(rule, key)] if key not in found else []
        values = {getattr(owner, key) for owner in owners}
        if key in parameters and key != "rule":
            values.add(parameters[key])
        found.setdefault(key, set()).update(values)
    found["rung"] = {CosineLadder().rung}
    found["temperature"] = {SGLD().temperature}  # that of SPOS is its alpha; recipes keep the published value
    found["noise_in"] = {"gradient"}  # also published
    return found


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Method) if field.name not in OWN])
def test_a_recipe_has_the_default_of_the_library(key):
    assert library_defaults()[key] == {getattr(Method(), key)}


@pytest.mark.parametrize("name", ["svgd", "spos", "sgld", "cosine"])
def test_a_rule_without_settings_is_the_rule_of_the_library(name):
    rule = {"svgd": SVGD(), "spos": SPOS(temperature=1.0), "sgld": SGLD(), "cosine": CosineLadder()}[name]
    assert make_rule(Method(rule=name), num_data=100, total_steps=100) == rule


def test_data_is_one_over_the_number_of_training_items():
    spos = make_rule(Method(rule="spos", alpha="data", temperature="data"), num_data=100, total_steps=100)
    assert spos == SPOS(alpha=0.01, temperature=0.01)
    falling = make_rule(Method(rule="svgd", alpha="data", schedule="linear"), num_data=100, total_steps=10)
    assert isinstance(falling, SVGD) and callable(falling.alpha)
    assert [falling.alpha(step) for step in (0, 5, 10)] == pytest.approx([0.01, 0.005, 0.0])
    assert make_rule(Method(rule="sgld", temperature="data"), num_data=50, total_steps=1) == SGLD(temperature=0.02)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "linear"}, {0: 2.0, 50: 1.0, 100: 0.0}),
        ({"schedule": "cosine"}, {0: 2.0, 50: 1.0, 75: 1 - 0.5**0.5, 100: 0.0}),
        ({"schedule": "warmup"}, {0: 0.0, 5: 1.0, 10: 2.0, 100: 2.0}),  # the first tenth
        ({"until": 40}, {0: 2.0, 39: 2.0, 40: 0.0}),
    ],
)
@pytest.mark.parametrize("name", ["alpha", "ratio"])
def test_schedules_change_the_weight_over_the_training(name, settings, expected):
    weight = {"alpha": 2.0} if name == "alpha" else {"alpha": "auto", "ratio": 2.0}
    rule = make_rule(Method(rule="svgd", **weight, **settings), num_data=1, total_steps=100)
    assert {step: rule.value_at(name, step) for step in expected} == pytest.approx(expected)


def test_every_setting_of_a_method_reaches_its_rule_or_is_refused():
    sgld = make_rule(Method(rule="sgld", prior="gaussian", prior_std=0.5), num_data=100, total_steps=100)
    assert sgld == SGLD(prior=Gaussian(0.5, 100))
    ladder = make_rule(Method(rule="cosine", prior="gaussian"), num_data=100, total_steps=100)
    assert ladder == CosineLadder(prior=Gaussian(1.0, 100))
    in_logits = make_rule(Method(rule="cosine", space="logits"), num_data=100, total_steps=100)
    assert in_logits == CosineLadder(space="logits")
    with pytest.raises(
        RuleError, match=r"SGLD has no act_every and no until; leave out method\.act_every and method\.unt"
    ):
        make_rule(Method(rule="sgld", act_every=4, until=500), num_data=100, total_steps=100)
    for changes, message in (({"act_every": 4}, "leave act_every out"), ({"kernel": "imq"}, "sets kernel")):
        with pytest.raises(RuleError, match=message):
            make_rule(Method(rule="cosine", **changes), num_data=100, total_steps=100)

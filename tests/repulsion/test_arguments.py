"""Arguments of `repel`: rules by name, unknown arguments, and settings that would be ignored."""

import typing

import pytest
import torch

from repulsive import (
    SPOS,
    SVGD,
    CosineLadder,
    OptimizerError,
    RuleError,
    SelectionError,
    UnknownSetting,
    find_heads,
    repel,
)
from repulsive.integrations.deferred import Deferred
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.engine.recipe import Method
from repulsive.particles import RULES, rule_by_name
from repulsive.repulsion.arguments import RepelSettings, RuleAndSettings


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", RULES)
def test_rules_by_name(name, make_model, backward):
    model = make_model()
    optimizer = adam(model)
    handle = repel(model, optimizer, name, verbose=False)
    assert handle.rule == rule_by_name(name)
    backward(model)
    optimizer.step()
    assert handle.steps == 1


@pytest.mark.parametrize("rule", ["shpere", SVGD, 0.1])
def test_invalid_rules_are_refused(rule, make_model):
    with pytest.raises(RuleError, match=r"did you mean 'sphere'|did you mean SVGD\(\)|0.1 is not a rule"):
        repel(make_model(), None, rule)


def test_a_rule_of_a_wrong_type_is_named_in_one_line(make_model):
    model = make_model()
    with pytest.raises(RuleError, match=rf"rule=<{type(model).__name__} object> is not a rule") as error:
        repel(model, None, model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"alpha": 0.1}, "SVGD: rule=SVGD(stepsize='heads', alpha=0.1, space='sphere', smoothing=0, act_every=4)"),
        ({"ratio": 0.03}, "stepsize='heads', alpha='auto', ratio=0.03, space='sphere', smoothing=0, act_every=4)"),
        ({"act_every": 2}, "stepsize='heads', alpha='auto', ratio=0.01, space='sphere', smoothing=0, act_every=2)"),
        ({"stepsize": 1.0}, "stepsize is a setting of SVGD and SGLD: rule=SVGD(stepsize=1.0, alpha='auto', "),
        ({"tokens": 64}, "tokens is a setting of SVGD: rule=SVGD(stepsize='heads', space='logits', tokens=64)"),
        ({"alpha": lambda step: 0.1}, "rule=SVGD(stepsize='heads', alpha=..., space="),
        ({"kernel": "rfb"}, "kernel is a setting of SVGD: kernel='rfb' is unknown; did you mean 'rbf'?"),
        ({"beta": 1e5}, "beta is a setting of SPOS: rule=SPOS(beta=100000.0)"),
        ({"rung": "smoothing"}, "rung is a setting of CosineLadder: rule=CosineLadder(rung='smoothing')"),
        ({"lyers": "all"}, "repel has no argument 'lyers'; did you mean 'layers'?"),
    ],
)
def test_unknown_arguments_say_where_they_belong(options, text, make_model):
    model = make_model()
    optimizer = adam(model)
    with pytest.raises(UnknownSetting) as caught:
        repel(model, optimizer, verbose=False, **options)
    assert text in str(caught.value)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, RuleError)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("logits", {"alpha": 0.3}, "rule=SVGD(stepsize='heads', alpha=0.3, space='logits')"),
        ("spos", {"alpha": 0.3}, "rule=SPOS(alpha=0.3)"),
        (
            SVGD(alpha="auto", ratio=0.2, smoothing=0),
            {"space": "sphere"},
            "rule=SVGD(alpha='auto', smoothing=0, ratio=0.2, space='sphere')",
        ),
        (SVGD(space="sphere"), {"alpha": -1}, "SVGD(alpha=-1): must be a number >= 0"),
        ("sgld", {"beta": 10.0}, "rule=SPOS(beta=10.0)"),
        ("sphere", {"kernel": "imq"}, "space='sphere', ratio=0.01, act_every=4, kernel='imq')"),
        (None, {"space": "logits"}, "rule=SVGD(stepsize='heads', space='logits')"),
    ],
)
def test_the_suggestion_keeps_the_rule_that_was_given(rule, options, text, make_model):
    model = make_model()
    with pytest.raises(UnknownSetting) as caught:
        repel(model, adam(model), rule, verbose=False, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stepsize", 0.5),
        ("alpha", 0.1),
        ("alpha", "auto"),
        ("kernel", "hinge"),
        ("kernel", "cosine"),
        ("bandwidth", "released"),
        ("prior", "gaussian"),
        ("smoothing", 1.0),
        ("space", "weights"),
        ("space", "logits"),
        ("ratio", 0.03),
        ("circuits", "qk+ov"),
        ("tokens", 3),
        ("every", 8),
        ("act_every", 2),
        ("beta", 1e5),
        ("temperature", 0.1),
        ("noise", "released"),
        ("rung", "smoothing"),
    ],
)
def test_the_suggested_rule_can_be_built(name, value, make_model):
    model = make_model()
    with pytest.raises(UnknownSetting) as caught:
        repel(model, adam(model), verbose=False, **{name: value})
    rule = eval(str(caught.value).split("rule=")[1], {"SVGD": SVGD, "SPOS": SPOS, "CosineLadder": CosineLadder})
    assert getattr(rule, name) == value
    if type(rule) is SVGD and name not in ("space", "smoothing"):
        assert rule.space != "weights" and rule.smoothing == 0  # repulsion between weights lets norms grow


@pytest.mark.parametrize(
    "options",
    [
        {"layers": "first"},
        {"layers": [0]},
        {"parts": "q"},
        {"where": "encoder"},
        {"particle": "head"},
        {"match": "*.q"},
        {"layout": "strided"},
        {"example_inputs": torch.zeros(1, 2, 16)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_selection_beside_groups_is_refused(options, make_model):
    model = make_model()
    (name,) = options
    with pytest.raises(SelectionError, match=f"^{name}.* would be ignored"):
        repel(model, adam(model), groups=find_heads(model), verbose=False, **options)


def test_groups_with_the_defaults_written_out(make_model):
    model = make_model()
    groups = find_heads(model, layers="first")
    handle = repel(
        model, adam(model), "sphere", "".join(["a", "ll"]), "qkv", "all", "projection", groups=groups, verbose=False
    )
    assert handle.groups == groups


@pytest.mark.parametrize("kind", ["svgd", "spos"])
def test_recipes_that_carry_a_ratio_without_auto_still_load(kind):
    """Every recipe has a ratio, used or not, because the recipe table has a default."""
    assert make_rule(Method(rule=kind, alpha=0.5, ratio=0.3), 10, 10).alpha == 0.5
    assert make_rule(Method(rule=kind, alpha="auto", ratio=0.3), 10, 10).ratio == 0.3
    assert make_rule(Method(rule="cosine", alpha="auto", ratio=0.3), 10, 10).ratio == 0.3


def test_the_types_of_settings_are_those_of_repel():
    expected = typing.get_type_hints(repel)
    for name in ("model", "optimizer", "unknown", "return"):
        del expected[name]
    assert typing.get_type_hints(RuleAndSettings) == expected
    assert typing.get_type_hints(RepelSettings).keys() == expected.keys() - {"rule"}


@pytest.mark.parametrize(
    ("rule", "settings", "error", "text"),
    [
        (SVGD(), {"layers": "frist"}, SelectionError, "did you mean 'first'"),
        (SVGD(), {"parts": "qx"}, SelectionError, "letters q, k, v"),
        (SVGD(), {"where": "encodr"}, SelectionError, "did you mean 'encoder'"),
        (SVGD(), {"particle": "atom"}, SelectionError, "'projection', 'head'"),
        (SVGD(), {"layout": "stride"}, SelectionError, "'strided'"),
        (SVGD(), {"order": "clip"}, RuleError, "clip-repel"),
        (SVGD(), {"noise_in": "air"}, RuleError, "optimizer"),
        (SVGD(), {"force_in": "leap"}, RuleError, "step"),
        (SVGD(), {"measure_every": 0}, RuleError, "at least 1"),
        (SVGD(), {"max_norm": -1.0}, RuleError, "positive"),
        (SPOS(noise="released"), {"noise_in": "parameter"}, RuleError, "released"),
        ("shpere", {}, RuleError, "did you mean 'sphere'"),
    ],
)
def test_callbacks_refuse_misspelt_words_when_they_are_made(rule, settings, error, text):
    with pytest.raises(error, match=text):
        Deferred(rule, settings)


def test_callbacks_accept_what_depends_on_model_and_trainer():
    Deferred(SVGD(), {"layers": [0, -1], "order": "repel-clip", "match": "*.q", "verbose": False})
    Deferred("spos", {"noise_in": "optimizer", "order": "repel-clip", "max_norm": 1.0})


@pytest.mark.parametrize("rule", ["recommended", "paper", None])
@pytest.mark.parametrize("place", ["optimizer", "parameter"])
def test_a_place_for_the_noise_of_a_rule_without_noise_is_refused(rule, place, make_model):
    model = make_model()
    with pytest.raises(RuleError, match=f"noise_in='{place}': (SVGD|rule=None) has no noise; leave noise_in out"):
        repel(model, adam(model), rule, noise_in=place, verbose=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda groups, model: groups[0], r"got a single group; write groups=\[group\]"),
        (lambda groups, model: 3, "got int"),
        (
            lambda groups, model: list(model.stack.layers),
            r"got a list with a \w+; make .* with group_modules\(modules\)",
        ),
        (lambda groups, model: ["q"], "got a list with a str"),
    ],
    ids=["group", "number", "modules", "names"],
)
def test_groups_of_another_kind_are_refused(make, message, make_model):
    model = make_model()
    with pytest.raises(SelectionError, match=f"groups: expected a list of groups from find_heads, .*{message}"):
        repel(model, adam(model), groups=make(find_heads(model), model), verbose=False)
    assert repel(model, adam(model), groups=iter(find_heads(model)), verbose=False).attached


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"match": 3}, SelectionError, "match=3: expected a pattern"),
        ({"match": ["*", 2]}, SelectionError, "expected a pattern or a list of patterns"),
        ({"max_norm": "1"}, RuleError, "max_norm='1': must be a positive number"),
        ({"max_norm": True}, RuleError, "max_norm=True: must be a positive number"),
        ({"measure_every": True}, RuleError, "measure_every=True: must be a whole number"),
        ({"allow_unproved": "no"}, RuleError, "allow_unproved='no': must be True or False"),
        ({"verbose": "no"}, RuleError, "verbose='no': must be True, False or None"),
        ({"alpah": 1}, UnknownSetting, r"did you mean rule=SVGD\(alpha=...\)\?"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_values_of_another_type_are_refused(options, error, text, make_model):
    model = make_model()
    with pytest.raises(error, match=text):
        repel(model, adam(model), **{"verbose": False, **options})


def test_the_class_of_an_optimizer_is_refused(make_model):
    with pytest.raises(OptimizerError, match=r"got the class Adam; write Adam\(model.parameters\(\)\)"):
        repel(make_model(), torch.optim.Adam)


def test_an_error_of_the_model_says_that_it_ran_on_the_example(make_model):
    model = make_model()
    with pytest.raises(Exception) as raised:  # noqa: PT011, raised by the model
        repel(model, adam(model), example_inputs="text")
    assert "while it ran on example_inputs" in raised.value.__notes__[0]

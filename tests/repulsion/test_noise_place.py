"""Where noise enters by default, which optimizers are refused for rules with noise, and short second moments."""

import re
import warnings

import pytest
import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, heads_by_hand, repel
from repulsive.errors import OptimizerError
from repulsive.integrations.deferred import Deferred
from repulsive.lab.bench.rules import build_cases
from repulsive.lab.engine.recipe import Method
from tests.threads import one_thread  # noqa: F401  an autouse fixture


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        pass


class Shampoo(Lion):
    pass


class AdamWScheduleFree(Lion):
    pass


class OwnAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class ScheduleFreeWrapper(torch.optim.Optimizer):
    """A wrapper that changes the weights after the step of the optimizer inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


REASONS = {
    Lion: "sign of its momentum",
    Shampoo: "by matrices",
    AdamWScheduleFree: "average of its iterates",
    OwnAdamW: "step method of its own",
    torch.optim.Adagrad: "decay to zero",
    torch.optim.NAdam: "not known here",
    torch.optim.RAdam: "not known here",
}
if hasattr(torch.optim, "Muon"):
    REASONS[torch.optim.Muon] = "orthogonalises"
if hasattr(torch.optim, "Adafactor"):
    REASONS[torch.optim.Adafactor] = "root mean square"


def make(kind, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 8, bias=False)
    return model, kind(model.parameters(), lr=0.01, **options)


def attach(model, optimizer, rule, **options):
    return repel(model, optimizer, rule, groups=heads_by_hand(model, {"weight": ("q", 4)}), verbose=False, **options)


@pytest.mark.parametrize("rule", ["sgld", "spos", SPOS(temperature=1.0)], ids=["sgld", "spos", "two temperatures"])
@pytest.mark.parametrize("kind", REASONS)
def test_optimizers_with_unknown_steps_are_refused_by_default(kind, rule):
    model, optimizer = make(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the refusal comes before any warning, such as the one about Muon
        with pytest.raises(OptimizerError, match=f"does not support {kind.__name__}: .*{REASONS[kind]}") as caught:
            attach(model, optimizer, rule)
    message = str(caught.value)
    assert "SGD, Adam, AdamW, RMSprop" in message and "rule without noise" in message
    assert re.search(r"noise_in='parameter' run under any optimizer, but .* do not sample", message)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.filterwarnings("ignore:.*orthogonalises its updates:UserWarning")
@pytest.mark.parametrize("kind", REASONS)
def test_other_places_and_rules_without_noise_are_not_refused(kind):
    for place in ("gradient", "parameter"):
        assert attach(*make(kind), "sgld", noise_in=place).settings.noise_in == place
    assert attach(*make(kind), "spos-paper").settings.noise_in == "gradient"
    for rule in (SVGD(), None, SGLD(temperature=0.0), "recommended"):
        assert attach(*make(kind), rule).settings.noise_in == "gradient"


def test_a_wrapper_with_steps_of_its_own_is_refused():
    model, inner = make(torch.optim.SGD)
    with pytest.raises(OptimizerError, match=r"does not support ScheduleFreeWrapper: it wraps SGD.*pass the wrapped"):
        attach(model, ScheduleFreeWrapper(inner), "sgld")
    assert attach(model, inner, "sgld").settings.noise_in == "optimizer"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_default_follows_the_step_of_known_optimizers(kind):
    ends = []
    for options in ({}, {"noise_in": "optimizer"}, {"noise_in": "gradient"}):
        model, optimizer = make(kind)
        attach(model, optimizer, SGLD(0.1, 1e-4), **options)
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        ends.append(model.weight.detach())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_published_and_other_noise_stays_in_the_gradient():
    class OtherNoise(SGLD):
        def noise_scale(self, lr):
            return 0.1

    adam = torch.optim.Adam
    for rule in ("spos-paper", SPOS(noise="released"), OtherNoise()):
        assert attach(*make(adam), rule).settings.noise_in == "gradient"
    assert attach(*make(adam), "spos-paper", noise_in="optimizer").settings.noise_in == "optimizer"
    assert Method().noise_in == "gradient"  # the recipes, unless they say otherwise


def test_callbacks_and_the_benchmark_treat_names_as_repel_does():
    for name, expected in (("spos-paper", "gradient"), ("spos", "optimizer"), ("sgld", "optimizer")):
        model, optimizer = make(torch.optim.Adam)
        deferred = Deferred(name, {"groups": heads_by_hand(model, {"weight": ("q", 4)}), "verbose": False})
        deferred.begin(model, [(optimizer, {})])
        assert deferred.handles[0].settings.noise_in == expected
        case = build_cases([name])[name]
        model, optimizer = make(torch.optim.Adam)
        assert attach(model, optimizer, case.rule, noise_in=case.noise_in).settings.noise_in == expected


SHORT = {
    "rmsprop": (torch.optim.RMSprop, {}, "100 steps .alpha=0.99.*Choose alpha=0.999"),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95)}, "20 steps .beta2=0.95.*Choose beta2=0.999"),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.99)}, "100 steps .beta2=0.99"),
}


@pytest.mark.parametrize("case", SHORT)
def test_a_short_second_moment_is_warned_about_once(case):
    kind, options, message = SHORT[case]
    model, optimizer = make(kind, **options)
    with pytest.warns(UserWarning, match=message) as caught:
        attach(model, optimizer, "sgld")
    assert len(caught) == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_no_warning_about_long_second_moments(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(*make(kind), "sgld")
        attach(*make(torch.optim.RMSprop, alpha=0.995), "sgld")
        attach(*make(torch.optim.RMSprop), "sgld", noise_in="gradient")
        attach(*make(torch.optim.RMSprop), "recommended")

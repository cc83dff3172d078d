"""Updates in waves: the same numbers as in one wave, for every kind of launch."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from repulsive import SPOS, SVGD, CosineLadder, group_modules
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.waves import count_waves, split_into_waves
from tests.repulsion.test_fused import DEVICE, GPU, Weights, few_programs, gradients, run  # noqa: F401


def test_waves_cover_every_group_once():
    waves = split_into_waves([1, 3, 1, 2, 2], 3)
    assert [(wave.groups, wave.slices) for wave in waves] == [
        (range(0, 1), range(0, 1)),
        (range(1, 3), range(1, 5)),
        (range(3, 5), range(5, 9)),
    ]
    assert [len(wave.groups) for wave in split_into_waves([1] * 36, 5)] == [7, 7, 7, 7, 8]
    assert len(split_into_waves([1, 1], 4)) == 2, "at most one wave per group"


def test_waves_that_fit_a_cache():
    """BERT-base has 12 x 3 projections of 768 x 768 in float32; an H200 has 50 MB of L2 cache."""
    numbers = 36 * 768 * 768
    assert count_waves(numbers, 4, 50 * 10**6) == 6
    assert 2 * 4 * numbers / 6 < 50e6 * 2 / 3 < 2 * 4 * numbers / 5
    assert count_waves(1000, 4, 50 * 10**6) == 1


RULES = [
    SVGD(alpha="auto", ratio=0.5, space="sphere", smoothing=0),
    SPOS(0.1, 1.0, 10.0),
    CosineLadder(alpha=1.0),
]


@pytest.mark.parametrize("streams", [1, 2] if GPU else [1])
@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_waves_change_nothing(rule, streams, monkeypatch):
    torch.manual_seed(0)
    model = Weights(3, 2, 6, torch.float32)
    groups = [*model.joined, *model.groups[-3:]]  # the first has three slices, the others one
    measure = rule is RULES[0]
    expected, of_one = run(model, groups, rule, monkeypatch, "triton", measure=measure)
    monkeypatch.setattr(launch_settings, "WAVES", 3)
    monkeypatch.setattr(launch_settings, "STREAMS", streams)
    found, of_three = run(model, groups, rule, monkeypatch, "triton", measure=measure)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for name, measured in of_one.items():
        torch.testing.assert_close(of_three[name].values(), measured.values(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("setting", "value"), [("BACKWARD", True), ("COMBINE_SPLITS", 3)])
def test_settings_of_combine_change_nothing(setting, value, monkeypatch):
    """Programs of several blocks, the last one not full, in either direction; any number of programs."""
    monkeypatch.setattr(launch_settings, "COMBINE", {4: {"BLOCK": 16, "num_warps": 4}})
    torch.manual_seed(0)
    model = Weights(3, 4, 25, torch.float32)
    groups = [model.groups[0], model.groups[-1]]
    expected, _ = run(model, groups, SVGD(alpha=1.0), monkeypatch, "triton")
    monkeypatch.setattr(launch_settings, setting, value)
    found, _ = run(model, groups, SVGD(alpha=1.0), monkeypatch, "triton")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_waves_of_heads_in_separate_modules(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    found = []
    for waves in (1, 2):
        monkeypatch.setattr(launch_settings, "WAVES", waves)
        torch.manual_seed(0)
        modules = [nn.Linear(6, 4, bias=False, device=DEVICE) for _ in range(6)]
        for index, module in enumerate(modules):
            module.weight.grad = torch.full_like(module.weight, float(index))
        groups = [*group_modules(modules[:3], name="a"), *group_modules(modules[3:], name="b")]
        Update(groups, seed=0).run(StepInputs(SVGD(alpha=1.0), 0))
        found.append(torch.stack([module.weight.grad for module in modules]))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 3])
def test_replays_of_waves(streams, monkeypatch):
    """From the third call on, all waves are one graph, on one stream or on several."""
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    torch.manual_seed(0)
    model, found = Weights(12, 16, 64, torch.float32), []
    for waves in (1, 4):
        monkeypatch.setattr(launch_settings, "WAVES", waves)
        monkeypatch.setattr(launch_settings, "STREAMS", streams)
        update = Update(model.groups, seed=7)
        for step in range(6):
            gradients(model, seed=step)
            update.run(StepInputs(SPOS(0.1, 1.0, 10.0), step, {id(p): 0.05 for p in model.parameters()}))
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

"""Measurements and held ratios of the Triton kernels against the eager reference."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from repulsive import SGLD, SPOS, SVGD
from repulsive.particles import KernelFree
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.repulsion.fused_weights import (
    DEVICE,
    GPU,
    Weights,
    error,
    few_programs,  # noqa: F401  an autouse fixture
    gradients,
    run,
)

MEASURED = [
    SVGD(alpha=1.0),
    SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0),
    SVGD(alpha="auto", ratio=lambda step: 0.1 * step, kernel="imq", bandwidth="released", prior="gaussian"),
    SVGD(alpha="auto", ratio=0.2, kernel="cosine"),
    SVGD(alpha="auto", kernel="hinge", space="sphere"),
    SPOS(0.1, "auto", 10.0, smoothing=0.4),
    SGLD(0.1, 0.5),
    SGLD(0.1, 0.5, prior="gaussian"),
    KernelFree(alpha=1.0),
    KernelFree(alpha="auto", smoothing=0),
]


def check_measured(found, expected):
    """Compare measurements; NaN equals NaN."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        numbers = found[name]
        for key, value in values.items():
            is_equal = math.isclose(numbers[key], value, rel_tol=1e-5, abs_tol=1e-6)
            assert is_equal or (math.isnan(value) and math.isnan(numbers[key])), (name, key, numbers[key], value)


@pytest.mark.parametrize("rule", MEASURED, ids=range(len(MEASURED)))
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12, 16, 32] if GPU else [4])
def test_measurements_agree(heads, rule, monkeypatch):
    """With a loss scale, near-duplicate heads in one group and a zero head in another; gradients agree as well."""
    torch.manual_seed(0)
    model = Weights(heads, 2, 12, torch.float32)
    groups = [*(model.groups[index] for index in (0, 1, 7)), *model.joined]  # strided, contiguous, transposed, three
    with torch.no_grad():
        (part,) = groups[0].slices
        values = part.take(part.parameter())
        part.put(part.parameter(), values[:1] + 0.5 * values)
        (part,) = groups[2].slices
        part.parameter().index_fill_(part.axis, part.rows[0].to(DEVICE), 0.0)
    for chosen in (groups[:3], groups[3:]):
        scale = torch.tensor(64.0, device=DEVICE)
        expected, of_eager = run(model, chosen, rule, monkeypatch, "eager", scale=scale, measure=True)
        found, of_triton = run(model, chosen, rule, monkeypatch, "triton", scale=scale, measure=True)
        check_measured(of_triton, of_eager)
        assert error(found, expected) < 3e-6


def test_updates_of_several_sizes_measure_together(monkeypatch):
    """As in a model whose query heads share key-value heads; in the second step one size needs the eager backend."""
    torch.manual_seed(0)
    many, few = models = nn.ModuleList(Weights(heads, 1, 4, torch.float32) for heads in (3, 2))
    groups = [many.groups[1], few.groups[7], many.groups[2], many.groups[3]]
    results = []
    for choice in ("eager", "triton"):
        monkeypatch.setenv("REPULSIVE_KERNELS", choice)
        update = Update(groups, seed=7)
        for step in range(2):
            gradients(models, seed=step)
            if step:
                few.transposed.grad = few.transposed.grad.T.contiguous().T
            measured = update.run(StepInputs(SVGD(alpha=1.0), step, measure=True))
            assert len(measured) == (2 if choice == "eager" else 1 + step)
            results.append({name: one.values(name) for one in measured for name in one.rows})
    for found, expected in zip(results[2:], results[:2], strict=True):
        check_measured(found, expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("smoothing", [0, 0.7])
def test_a_ratio_is_held_with_any_number_of_heads(heads, smoothing, monkeypatch):
    torch.manual_seed(0)
    model = Weights(heads, 2, 6, torch.float32)
    rule = SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=smoothing)
    groups = [model.groups[index] for index in (1, 7)]
    expected, of_eager = run(model, groups, rule, monkeypatch, "eager", measure=True)
    found, of_triton = run(model, groups, rule, monkeypatch, "triton", measure=True)
    check_measured(of_triton, of_eager)
    assert error(found, expected) < 3e-6
    again, nothing = run(model, groups, rule, monkeypatch, "triton")
    assert error(again, found) < 1e-7 and not nothing  # the same update without a measurement


def test_a_held_ratio_against_the_formula_in_float64(monkeypatch):
    torch.manual_seed(0)
    model = Weights(5, 3, 10, torch.float32)
    rule = SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=0)
    (part,) = model.groups[1].slices
    gradients(model)
    theta, grad = (part.take(x).double() for x in (part.parameter().detach(), part.parameter().grad))
    expected = rule.gradient(theta, grad)
    run(model, model.groups[1:2], rule, monkeypatch, "triton")
    assert error([part.take(part.parameter().grad).double()], [expected]) < 3e-6


@pytest.mark.filterwarnings("ignore:all heads")
@pytest.mark.parametrize("space", ["weights", "sphere"])
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_equal_heads_hold_no_ratio(value, space, monkeypatch):
    model = Weights(5, 2, 6, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    rule, groups = SVGD(alpha="auto", space=space, smoothing=0), [model.groups[1], model.groups[7]]
    expected, of_eager = run(model, groups, rule, monkeypatch, "eager", measure=True)
    found, of_triton = run(model, groups, rule, monkeypatch, "triton", measure=True)
    check_measured(of_triton, of_eager)
    assert error(found, expected) < 3e-6
    assert all(values["alpha"] == 0 for values in of_triton.values())

"""The Triton kernels against the eager reference: on a GPU if there is one, otherwise in Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")
from repulsive import SGLD, SPOS, SVGD, CosineLadder
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.addresses import SliceTable
from tests.repulsion.fused_weights import (
    DEVICE,
    GPU,
    RAMP,
    Weights,
    error,
    few_programs,  # noqa: F401  an autouse fixture
    run,
)

RULES = [
    SVGD(alpha=1.0),
    SVGD(alpha=1.0, bandwidth="released"),
    SVGD(alpha=1.0, bandwidth=30.0, smoothing=0.3),
    SVGD(alpha=1.0, kernel="imq", prior="gaussian"),
    SVGD(alpha=3.0, space="sphere", smoothing=0.0),
    RAMP,
    SVGD(alpha="auto", ratio=0.5),
    SVGD(alpha=1.0, kernel="cosine"),
    CosineLadder(alpha=1.0),
    SPOS(0.1, 1.0, 10.0),
    SPOS(0.1, 1.0, 10.0, noise="released"),
    SGLD(0.1, 0.5),
    SVGD(alpha=1.0, bandwidth="released-lower"),
    SVGD(alpha=1.0, kernel="hinge", space="sphere"),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RULES[:6], SVGD(alpha="auto", space="sphere"), *RULES[7:9]])
@pytest.mark.parametrize(("length", "tolerance"), [(0.0, 3e-6), (1e-3, 3e-6), (5e-3, 5e-3)])
def test_heads_that_are_nearly_zero(rule, length, tolerance, monkeypatch):
    torch.manual_seed(0)
    model = Weights(5, 4, 24, torch.float32)
    with torch.no_grad():
        for group in model.groups:
            (part,) = group.slices
            for head in (1, 3):
                rows = part.rows[head].to(DEVICE)
                part.parameter().index_copy_(part.axis, rows, length * part.parameter().index_select(part.axis, rows))
    expected, _ = run(model, model.groups, rule, monkeypatch, "eager")
    found, _ = run(model, model.groups, rule, monkeypatch, "triton")
    assert all(gradient.isfinite().all() for gradient in expected) and error(found, expected) < tolerance


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_every_rule_and_layout(rule, monkeypatch):
    torch.manual_seed(0)
    model = Weights(4, 4, 24, torch.float32)
    for groups in (model.layouts, model.joined):
        expected, _ = run(model, groups, rule, monkeypatch, "eager")
        found, _ = run(model, groups, rule, monkeypatch, "triton")
        assert error(found, expected) < 3e-6


@pytest.mark.parametrize(
    "heads", [1, 3, 8, 16] + [pytest.param(n, marks=pytest.mark.slow) for n in (2, 12, 30, 32, 50, 64)]
)
def test_any_number_of_heads(heads, monkeypatch):
    torch.manual_seed(0)
    model = Weights(heads, 3, 20, torch.float32)
    for rule in (SVGD(alpha=1.0), SVGD(alpha=1.0, bandwidth="released", space="sphere")):
        expected, _ = run(model, model.layouts, rule, monkeypatch, "eager")
        found, _ = run(model, model.layouts, rule, monkeypatch, "triton")
        assert error(found, expected) < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, monkeypatch):
    torch.manual_seed(0)
    model = Weights(4, 4, 24, dtype)
    expected, _ = run(model, model.groups, SVGD(alpha=1.0), monkeypatch, "eager")
    found, _ = run(model, model.groups, SVGD(alpha=1.0), monkeypatch, "triton")
    step = torch.finfo(dtype).eps
    assert error(found, expected) < (step / 2 if GPU else step)  # one rounding at the end; the interpreter truncates


@pytest.mark.parametrize(
    "rule", [SVGD(alpha=1.0), SVGD(alpha="auto"), SPOS(0.1, 1.0, 10.0), SPOS(0.1, 1.0, 10.0, noise="released")]
)
def test_scaled_gradients(rule, monkeypatch):
    torch.manual_seed(0)
    model = Weights(4, 4, 24, torch.float32)
    scale = torch.tensor(1024.0, device=DEVICE)
    expected, _ = run(model, model.layouts, rule, monkeypatch, "eager")
    found, _ = run(model, model.layouts, rule, monkeypatch, "triton", scale=scale)
    assert error([x / scale for x in found], expected) < 3e-6


@pytest.mark.parametrize("heads", [4, 12])
def test_chunks_of_sixteen_columns(heads, monkeypatch):
    """Heads side by side in the rows of a weight, as in GPT-2: 16 columns of a head are read at once."""
    torch.manual_seed(0)
    model = Weights(heads, 32, 48, torch.float32)
    groups = model.groups[-3:]
    table = SliceTable(groups, 0, 4)
    assert table.chunked and not table.flat
    rule = SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0)
    expected, _ = run(model, groups, rule, monkeypatch, "eager")
    found, _ = run(model, groups, rule, monkeypatch, "triton")
    assert error(found, expected) < 3e-6


@pytest.mark.parametrize("heads", [4, 16, 64])
def test_nearly_equal_heads(heads, monkeypatch):
    """Heads 0.1 % apart: the mean is subtracted before products are formed, and these are not rounded to TF32."""
    torch.manual_seed(0)
    model = Weights(heads, 8, 512 if GPU else 64, torch.float32)
    with torch.no_grad():
        for group in model.groups:
            part = group.slices[0]
            heads = part.take(part.parameter())
            part.put(part.parameter(), heads[:1] + 1e-3 * heads)
    expected, _ = run(model, model.layouts, SVGD(alpha=1.0), monkeypatch, "eager")
    found, _ = run(model, model.layouts, SVGD(alpha=1.0), monkeypatch, "triton")
    assert error(found, expected) < 1e-4


@pytest.mark.filterwarnings("ignore:all heads")
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_equal_heads_and_nan(value, monkeypatch):
    model = Weights(4, 4, 24, torch.float32)
    groups = [*model.groups[1:4], model.groups[8]]  # of one packed weight, and of another weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    expected, _ = run(model, groups, SVGD(alpha=1.0), monkeypatch, "eager")
    found, _ = run(model, groups, SVGD(alpha=1.0), monkeypatch, "triton")
    assert error(found, expected) < 3e-6
    with torch.no_grad():
        model.packed[3, 5] = math.nan
    found, _ = run(model, groups, SVGD(alpha=1.0), monkeypatch, "triton")
    packed = model.packed.grad.view(3, -1)
    assert packed[0].isnan().all(), "the group of the NaN must be NaN"
    assert packed[1:].isfinite().all() and model.transposed.grad.isfinite().all()


@pytest.mark.slow
def test_few_long_slices_are_split_further(monkeypatch):
    def splits(slices, dim):
        return launch_settings.splits_per_slice("gram", slices, dim, 4, torch.device("cpu"))

    monkeypatch.setattr(launch_settings, "SPLITS", 16)
    assert splits(54, 65_536) == 16  # as many programs as a GPU can use
    assert splits(1, 150) == 16  # too short to be worth it
    assert splits(6, 2_097_152) == 128
    if not GPU:
        monkeypatch.setattr(launch_settings, "SPLITS", 2)
    monkeypatch.setattr(launch_settings, "LEAST", 1)
    monkeypatch.setattr(launch_settings, "BUSY", 24 * launch_settings.SPLITS)
    torch.manual_seed(0)
    model = Weights(3, 2, 40, torch.float32)
    assert splits(len(model.groups), 80) > launch_settings.SPLITS
    for rule in (SVGD(alpha=1.0), SVGD(alpha="auto", ratio=0.3)):
        expected, _ = run(model, model.groups, rule, monkeypatch, "eager")
        found, _ = run(model, model.groups, rule, monkeypatch, "triton")
        assert error(found, expected) < 3e-6


def test_constants_of_the_kernels_equal_themselves():
    """Triton compares global constants with those it compiled; a NaN differs from itself, and every launch failed."""
    import triton.language as tl

    from repulsive.repulsion.backends.triton_kernels import combine, gram, noise, pack, slices, solve

    names = [pair for module in (combine, gram, noise, pack, slices, solve) for pair in vars(module).items()]
    constants = {name: value for name, value in names if isinstance(value, tl.constexpr)}
    assert {"SHORTEST2", "_GOLDEN"} <= set(constants)
    assert [name for name, constant in constants.items() if constant.value != constant.value] == []

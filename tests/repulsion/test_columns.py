"""Launches that keep columns in registers, against float64, the eager backend, and the launches on tensor cores."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from repulsive import SPOS, SVGD, group_modules
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.fused import FusedUpdate
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.local_update import LocalUpdate, Reduction
from tests.repulsion import test_fused_modules as modules
from tests.repulsion.fused_weights import DEVICE, GPU, Weights, error, gradients, run

has_tuples = pytest.mark.skipif(not launch_settings.has_tuples(), reason="Triton before 3.3 has no tuples")


def use_columns(monkeypatch, heads, width, warps=1):
    """Keep columns in registers in all launches for a number of heads."""
    sizes = {"BLOCK": 32 * warps * width, "num_warps": warps, "programs": 8, "WIDTH": width}
    table = {"gram": sizes, "combine": sizes | {"UNROLL": 2}}
    table["combine with noise"] = sizes | {"UNROLL": 1}
    monkeypatch.setitem(launch_settings.BY_COLUMN, launch_settings.pad_heads(heads), table)
    monkeypatch.setattr(launch_settings, "LEAST", 1)


@has_tuples
@pytest.mark.parametrize(
    ("heads", "width", "warps"),
    [
        *((2, 4, 1), (3, 1, 2), (4, 2, 1), (8, 4, 1), (12, 4, 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((12, 2, 2), (16, 2, 1))),
    ],
)
def test_products_against_float64(heads, width, warps, monkeypatch):
    """Strided, packed, interleaved and transposed weights; the last block of a program is not full."""
    use_columns(monkeypatch, heads, width, warps)
    torch.manual_seed(0)
    model = Weights(heads, 4, 25, torch.float32)
    gradients(model)
    groups = [model.groups[k] for k in (0, 1, 5, 9)]
    update = FusedUpdate(groups, seed=0)
    assert update.refresh()
    update._gram(sources=1, norms_only=False)
    expected = []
    for group in groups:
        (part,) = group.slices
        theta = part.take(part.parameter().detach()).double()  # [M, D]
        mean = theta.mean(0, keepdim=True)
        particles = torch.cat([theta - mean, mean])
        expected.append(particles @ particles.T)
    found = update._products_of_groups(0)
    assert float((found - torch.stack(expected)).norm() / torch.stack(expected).norm()) < 3e-7


RULES = {
    "smoothed": SVGD(alpha=1.0),
    "auto": SVGD(alpha="auto", ratio=0.5),
    "norms": SVGD(alpha="auto", ratio=0.5, space="sphere", smoothing=0.0),
    "noise": SPOS(0.1, 1.0, 10.0),
}


@has_tuples
@pytest.mark.parametrize(
    ("heads", "width", "name", "scale"),
    [
        *((2, 4, "smoothed", None), (3, 1, "noise", 64.0), (8, 2, "norms", None), (12, 4, "smoothed", 64.0)),
        (12, 4, "noise", None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((12, 2, "auto", None), (16, 2, "norms", 64.0))),
    ],
)
def test_an_update_of_every_layout(heads, width, name, scale, monkeypatch):
    use_columns(monkeypatch, heads, width)
    torch.manual_seed(0)
    model = Weights(heads, 2, 24, torch.float32)
    groups = [model.groups[k] for k in (0, 2, 6, 8)]
    scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    expected, _ = run(model, groups, RULES[name], monkeypatch, "eager", scale=scale)
    found, _ = run(model, groups, RULES[name], monkeypatch, "triton", scale=scale)
    assert error(found, expected) < 1e-6


@has_tuples
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, monkeypatch):
    use_columns(monkeypatch, 4, 4)
    torch.manual_seed(0)
    model = Weights(4, 4, 24, dtype)
    expected, _ = run(model, model.groups, SVGD(alpha=1.0), monkeypatch, "eager")
    found, _ = run(model, model.groups, SVGD(alpha=1.0), monkeypatch, "triton")
    step = torch.finfo(dtype).eps
    assert error(found, expected) < (step / 2 if GPU else step)  # as in `test_fused`


@has_tuples
@pytest.mark.parametrize("name", ["smoothed", "norms", "noise"])
def test_heads_in_separate_modules(name, monkeypatch):
    use_columns(monkeypatch, 5, 2)
    experts = modules.make_experts(5)
    groups = group_modules(experts)
    expected, _ = modules.run(experts, groups, RULES[name], monkeypatch, "eager")
    found, update = modules.run(experts, groups, RULES[name], monkeypatch, "triton")
    assert update._was_fused and modules.same(found, expected)


@has_tuples
def test_a_shard_has_the_noise_of_its_place_in_the_head(monkeypatch):
    """Both implementations draw the same noise for a shard."""
    found = []
    layer = nn.Linear(8, 24, bias=False, device=DEVICE)
    part = HeadSlice(layer, "weight", "weight", torch.arange(24).view(12, 2))
    groups = [HeadGroup("heads", 0, "q", "encoder", "", "test", (part,))]
    for is_by_column in (False, True):
        if is_by_column:
            use_columns(monkeypatch, 12, 1)
        layer.weight.grad = torch.ones_like(layer.weight)
        local = LocalUpdate(groups, 0, [(8, 16, 4, 32)], [True])
        assert local.refresh()
        local.prepare(RULES["noise"], StepInputs(RULES["noise"], 0, {id(layer.weight): 0.1}))
        Reduction((), [local]).sum_products()
        local.finish()
        found.append(layer.weight.grad)
    assert error(found[1:], found[:1]) < 1e-6


def test_triton_without_tuples_keeps_the_launches_on_tensor_cores(monkeypatch):
    use_columns(monkeypatch, 12, 4)
    monkeypatch.setattr(launch_settings, "_triton_version", lambda: (3, 2))
    assert launch_settings.column_settings("gram", 12) is None
    programs = launch_settings.PROGRAMS[16]["gram"]
    assert launch_settings.splits_per_slice("gram", 1, 1024, 12, torch.device("cpu")) == programs
    monkeypatch.setattr(launch_settings, "_triton_version", lambda: (3, 3))
    assert launch_settings.column_settings("gram", 12) == {"BLOCK": 128, "num_warps": 1, "WIDTH": 4}
    assert launch_settings.splits_per_slice("gram", 1, 1024, 12, torch.device("cpu")) == 8


@has_tuples
def test_more_heads_than_measured_keep_the_launches_on_tensor_cores():
    assert launch_settings.column_settings("combine", 9) == {"BLOCK": 256, "num_warps": 2, "WIDTH": 4, "UNROLL": 3}
    assert launch_settings.column_settings("combine", 13) is None
    assert launch_settings.column_settings("combine", 8) is None
    sizes = (1, 1 << 20, 13, torch.device("cpu"))
    assert launch_settings.splits_per_slice("combine with noise", *sizes) == 10


@has_tuples
def test_noise_after_the_step_does_not_take_the_few_programs_of_columns():
    """It computes as much as it reads, and became twice as slow with those of the Gram matrices."""
    sizes = (1, 1 << 20, 12, torch.device("cpu"))
    assert launch_settings.splits_per_slice("step noise", *sizes) > 3 * launch_settings.splits_per_slice("gram", *sizes)

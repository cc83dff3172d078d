"""The Triton kernels against the eager reference: on a GPU if there is one, otherwise in Triton's interpreter."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

from repulsive import SGLD, SPOS, SVGD, CosineLadder, repel  # noqa: E402
from repulsive.heads.layout import HeadGroup, HeadSlice  # noqa: E402
from repulsive.particles import KernelFree  # noqa: E402
from repulsive.repulsion.backends import launch_settings  # noqa: E402
from repulsive.repulsion.backends.addresses import SliceTable  # noqa: E402
from repulsive.repulsion.backends.choose import Update  # noqa: E402
from repulsive.repulsion.backends.inputs import StepInputs  # noqa: E402


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if not GPU:
        monkeypatch.setattr(launch_settings, "SPLITS", 2)  # the interpreter runs programs one by one


class Weights(nn.Module):
    """Projections of every layout: packed head after head, interleaved, transposed, strided."""

    def __init__(self, heads: int, dim: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        out = heads * dim
        make = lambda *shape: nn.Parameter(torch.randn(*shape))  # noqa: E731
        self.strided, self.packed, self.interleaved = (make(n * out, columns) for n in (1, 3, 3))
        self.transposed = make(columns, 3 * out)
        self.to(DEVICE, dtype)
        count = torch.arange(3 * out)
        tables = {
            "strided": [count[:out].view(dim, heads).T.contiguous()],
            "packed": list(count.view(3, heads, dim)),
            "interleaved": list(count.view(heads, 3, dim).unbind(1)),
            "transposed": list(count.view(3, heads, dim)),
        }
        self.groups = []
        for name, rows in tables.items():
            for number, table in enumerate(rows):
                part = HeadSlice(self, name, name, table, axis=1 if name == "transposed" else 0)
                self.groups.append(HeadGroup(f"{name}.{number}", 0, "q", "encoder", "", "test", (part,)))
        # The interpreter runs groups one after another: one of each layout, and not the first of its weight.
        self.layouts = self.groups if GPU else [self.groups[index] for index in (0, 2, 6, 8)]
        joined = tuple(g.slices[0] for g in self.groups[1:4])
        self.joined = [HeadGroup("joined", 0, "qkv", "encoder", "", "test", joined)]


def gradients(model: Weights, seed: int = 1) -> None:
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=source).to(parameter)


def run(model, groups, rule, monkeypatch, choice, *, scale=None, step=3, measure=False):
    monkeypatch.setenv("REPULSIVE_KERNELS", choice)
    gradients(model)
    if scale is not None:
        for parameter in model.parameters():
            parameter.grad *= scale
    update = Update(groups, seed=7)
    rates = {id(p): 0.05 for p in model.parameters()}
    measured = update.run(StepInputs(rule, step, rates, scale=scale, measure=measure))
    found = {name: one.values(name) for one in measured for name in one.rows}
    assert (update._fused is not None) == (choice == "triton"), "the wrong path ran"
    assert update._eager_rest is None
    return [parameter.grad.float() for parameter in model.parameters()], found


def error(found, expected):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


RAMP = SVGD(alpha=lambda step: 0.1 * step)
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


@pytest.mark.parametrize("noise", ["langevin", pytest.param("released", marks=pytest.mark.slow)])
def test_a_step_counts_noise_like_the_reference(noise, monkeypatch):
    """Several steps with different gradients, one of them after a jump as by load_state_dict."""
    torch.manual_seed(0)
    model, rule = Weights(4, 4, 24, torch.float32), SPOS(0.1, 1.0, 10.0, noise=noise)
    update, rates = Update(model.layouts, seed=7), {id(p): 0.05 for p in model.parameters()}
    for step in (0, 1, 2, 9):
        monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
        gradients(model, seed=step)
        update.run(StepInputs(rule, step, rates))
        found = [p.grad.float() for p in model.parameters()]
        monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
        gradients(model, seed=step)
        Update(model.layouts, seed=7).run(StepInputs(rule, step, rates))
        assert error(found, [p.grad.float() for p in model.parameters()]) < 3e-6


@pytest.mark.parametrize("choice", ["eager", "triton"])
def test_noise_times_the_median_of_a_group(choice, monkeypatch):
    """The median is over all slices of a group, as in `rule.gradient`."""
    torch.manual_seed(0)
    model = Weights(4, 4, 24, torch.float32)
    gradients(model)
    parts = model.joined[0].slices
    median = torch.cat([part.take(part.parameter().grad).flatten() for part in parts]).double().abs().median()
    kinds = (0, "langevin"), (1e4, "langevin"), (1e4, "released")
    rules = [SPOS(0.1, 1.0, 1e8, temperature=temperature, noise=noise) for temperature, noise in kinds]
    plain, langevin, released = (run(model, model.joined, rule, monkeypatch, choice)[0][1].double() for rule in rules)
    assert (langevin - plain).std() > 0.01
    assert torch.allclose(released - plain, median * (langevin - plain), atol=1e-6)


def test_training_through_the_handle(monkeypatch):
    """repel() itself, with gradients that move in memory at every step."""
    ends = []
    for choice in ("eager", "triton"):
        monkeypatch.setenv("REPULSIVE_KERNELS", choice)
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = SPOS(0.1, 1.0, 1e6)
        handle = repel(model, optimizer, rule, measure_every=2, noise_in="gradient", verbose=False)
        x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
        ends.append((model.self_attn.in_proj_weight.detach(), handle.report()[0].ratio))
    assert torch.allclose(ends[0][0], ends[1][0], rtol=1e-4, atol=1e-6)
    assert math.isclose(ends[0][1], ends[1][1], rel_tol=1e-3)


def test_weights_and_gradients_move_between_steps(monkeypatch):
    """A replaced parameter, moved gradients, one with other strides, one missing, and back again."""
    torch.manual_seed(0)
    model = Weights(4, 4, 24, torch.float32)
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    update = Update(model.layouts, seed=7)
    was_fused = []
    for step in range(5):
        gradients(model, seed=step)
        if step == 1:
            model.packed = nn.Parameter(model.packed.detach() + 0.5)
            model.packed.grad = torch.ones_like(model.packed)
        if step == 2:
            model.packed.grad = model.packed.grad.T.contiguous().T  # the same numbers, column by column
        if step == 3:
            model.strided.grad = None
        was_fused.append(all(one.refresh() for one in update._fused or update._make_fused()))
        if step == 3:
            continue  # `repel` uses an update of the other groups then
        start = [p.grad.clone() for p in model.parameters()]
        update.run(StepInputs(SVGD(alpha=1.0), step))
        found = [p.grad.clone() for p in model.parameters()]
        for parameter, grad in zip(model.parameters(), start, strict=True):
            parameter.grad = grad.contiguous()
        monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
        Update(model.layouts, seed=7).run(StepInputs(SVGD(alpha=1.0), step))
        monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
        assert error(found, [p.grad for p in model.parameters()]) < 3e-6
    assert was_fused == [True, True, False, False, True]


@pytest.mark.gpu
def test_no_host_synchronisation(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    model = Weights(4, 16, 64, torch.float32)
    update, rates = Update(model.groups, seed=0), {id(p): 0.05 for p in model.parameters()}
    for rule in (SVGD(), SVGD(alpha="auto"), SPOS(), SVGD(kernel="cosine"), CosineLadder(), SGLD(), KernelFree()):
        gradients(model)
        update.run(StepInputs(rule, 0, rates))  # compiles
        update.run(StepInputs(rule, 1, rates, measure=True))
        gradients(model, 2)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            update.run(StepInputs(rule, 2, rates, measure=True))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_inside_a_captured_graph(monkeypatch):
    """Replays of a captured update: right numbers for SVGD, fresh noise for SPOS."""
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    torch.manual_seed(0)
    model = Weights(4, 16, 64, torch.float32)
    gradients(model)
    start = [p.grad.clone() for p in model.parameters()]
    reset = lambda: [p.grad.copy_(g) for p, g in zip(model.parameters(), start, strict=True)]  # noqa: E731
    for rule in (SVGD(alpha=1.0), SPOS(0.1, 1.0, 10.0), SVGD(alpha="auto", space="sphere"), SGLD(0.1, 0.5)):
        update, rates = Update(model.groups, seed=0), {id(p): 0.05 for p in model.parameters()}
        update.run(StepInputs(rule, 0, rates))
        expected = []
        for step in (1, 2, 3):
            reset()
            update.run(StepInputs(rule, step, rates))
            expected.append([p.grad.clone() for p in model.parameters()])
        fresh = Update(model.groups, seed=0)
        reset()
        fresh.run(StepInputs(rule, 0, rates))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fresh.run(StepInputs(rule, 1, rates))
        for numbers in expected:
            reset()
            graph.replay()
            assert error([p.grad for p in model.parameters()], numbers) < 1e-6


@pytest.mark.gpu
def test_replays_follow_moving_gradients(monkeypatch):
    """From the third call on, the launches are one graph; weights and gradients may move at every call."""
    torch.manual_seed(0)
    model = Weights(4, 16, 64, torch.float32)
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    update, kept = Update(model.groups, seed=7), []
    for step in range(1, 6):
        gradients(model, seed=step)
        kept.append([p.grad for p in model.parameters()])  # kept, so that the next ones get other addresses
        start = [g.clone() for g in kept[-1]]
        update.run(StepInputs(RAMP, step))
        found = [p.grad.clone() for p in model.parameters()]
        for parameter, grad in zip(model.parameters(), start, strict=True):
            parameter.grad = grad
        monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
        Update(model.groups, seed=7).run(StepInputs(RAMP, step))
        monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
        assert error(found, [p.grad for p in model.parameters()]) < 3e-6


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_fused_adam_and_gradient_scaler(fused):
    ends = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        handle = repel(model, optimizer, SVGD(alpha=1.0), verbose=False)
        scaler = torch.amp.GradScaler(enabled=scaled, init_scale=256.0)
        x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        for index in range(5):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if scaled and index == 1:
                model.linear1.weight.grad[0, 0] = torch.inf
            if scaled or index != 1:
                scaler.step(optimizer)
            scaler.update()
        assert handle.steps == 4
        ends.append(model.self_attn.in_proj_weight.detach())
    assert torch.allclose(ends[0], ends[1], rtol=1e-3, atol=2e-5)


@pytest.mark.gpu
def test_a_compiled_training_step():
    model = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(torch.compile(model), optimizer, SVGD(), verbose=False)
    compiled = torch.compile(model)
    x = torch.randn(3, 5, 64, device=DEVICE)

    @torch.compile
    def step():
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    assert handle.steps == 3


@pytest.mark.gpu
def test_extra_memory_is_small(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    model = Weights(4, 128, 512, torch.float32)
    gradients(model)
    update = Update(model.groups, seed=0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in range(3):
        update.run(StepInputs(SVGD(), step, measure=step == 1))
    particles = sum(group.num_heads * group.dim * 4 for group in model.groups)
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * particles


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

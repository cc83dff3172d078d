"""`force_in="step"`: repulsion after the optimizer's step, against double loops; and the choice under Muon."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from repulsive import SVGD, CosineLadder, RuleError, UnsupportedWeights, find_heads, group_modules, group_stacked, repel
from repulsive.particles.kernel_free import KernelFree
from tests.particles.oracle import close, phi

HELD = {"alpha": "auto", "ratio": 0.2, "smoothing": 0}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def muon(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this version of torch has no Muon")
    return torch.optim.Muon(matrices(model), **{"lr": 0.02, "weight_decay": 0.0} | options)


class MyMuon(torch.optim.SGD):
    pass


def stepped(model, backward, optimizer, rule, *, steps=1, **options):
    """Train a copy with a rule; return the heads of every group before and after, and the handle."""
    handle = repel(model, optimizer, rule, verbose=False, **options)
    before = [group.read() for group in handle.groups]
    for index in range(steps):
        backward(model, index)
        optimizer.step()
    return before, [group.read() for group in handle.groups], handle


@pytest.mark.parametrize(
    ("settings", "particle"),
    [
        ({"space": "sphere"}, "projection"),
        ({"space": "sphere", "kernel": "imq"}, "head"),
        ({"space": "weights"}, "projection"),
        ({"space": "weights", "bandwidth": "released"}, "head"),
        ({"space": "weights", "prior": "gaussian"}, "projection"),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [muon, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)], ids=["Muon", "AdamW"])
def test_weights_get_the_ratio_times_the_step_along_the_force(make_model, backward, settings, particle, build):
    model = make_model()
    plain_model = copy.deepcopy(model)
    rule = SVGD(**HELD, **settings)
    drive = SVGD(alpha=0.0, smoothing=0, **settings)
    options, formula = {"particle": particle}, {key: settings[key] for key in settings if key != "prior"}
    _, plain, _ = stepped(plain_model, backward, build(plain_model), drive, force_in="gradient", **options)
    before, after, _ = stepped(model, backward, build(model), rule, force_in="step", **options)
    for old, without, with_force in zip(before, plain, after, strict=True):
        expected = phi(old, torch.zeros_like(old), alpha=1.0, smoothing=0.0, **formula)  # the prior is in the drive
        shift = 0.2 * (without - old).norm() * expected / expected.norm()
        assert close(with_force - without, shift, 1e-9)


def test_the_ratio_holds_for_all_changes_of_a_step_with_several_closure_calls(make_model):
    """LBFGS changes weights between calls of the closure; so does a step that perturbs weights, as SAM does."""
    model = make_model()

    def shifted(own, rule, **options):
        optimizer = torch.optim.LBFGS(own.parameters(), lr=0.1, max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = sum((p - 1).square().sum() for p in own.parameters())
            loss.backward()
            return loss

        handle = repel(own, optimizer, rule, verbose=False, **options)
        before = [group.read() for group in handle.groups]
        optimizer.step(closure)
        return before, [group.read() for group in handle.groups]

    plain_rule, rule = SVGD(alpha=0.0, smoothing=0, space="sphere"), SVGD(**HELD, space="sphere")
    _, plain = shifted(copy.deepcopy(model), plain_rule)
    before, after = shifted(model, rule, force_in="step")
    for old, without, with_force in zip(before, plain, after, strict=True):
        expected = phi(old, torch.zeros_like(old), alpha=1.0, smoothing=0.0, space="sphere")
        assert close(with_force - without, 0.2 * (without - old).norm() * expected / expected.norm(), 1e-9)


def test_the_force_is_tangential_on_the_sphere(make_model, backward):
    model = make_model()
    plain_model = copy.deepcopy(model)
    _, plain, _ = stepped(
        plain_model, backward, muon(plain_model), SVGD("heads", alpha=0.0, smoothing=0, space="sphere")
    )
    before, after, _ = stepped(model, backward, muon(model), "sphere")
    for old, without, with_force in zip(before, plain, after, strict=True):
        shift = with_force - without
        assert shift.norm() > 0 and ((shift * old).sum(1).abs() < 1e-12 * old.norm(dim=1)).all()


def test_repulsion_in_the_gradient_is_amplified_by_muon_and_after_the_step_it_is_not(make_model, backward):
    change = {}
    for place in ("gradient", "step"):
        model = make_model()
        plain_model = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before, plain, _ = stepped(plain_model, backward, muon(plain_model), SVGD("heads", alpha=0.0, smoothing=0))
            _, after, _ = stepped(model, backward, muon(model), "recommended", force_in=place)
        ratios = [(a - p).norm() / (p - b).norm() for a, p, b in zip(after, plain, before, strict=True)]
        change[place] = float(torch.stack(ratios).mean())
    assert change["step"] == pytest.approx(4 * 0.01, rel=1e-6)  # the rule acts in one of four steps
    assert change["gradient"] > 2 * 4 * 0.01


@pytest.mark.parametrize("rule", [KernelFree(alpha="auto"), CosineLadder(alpha="auto"), SVGD(alpha="auto")], ids=str)
def test_subclasses_and_smoothing(make_model, backward, rule):
    model = make_model()
    _, after, handle = stepped(model, backward, muon(model), rule, steps=2)
    assert handle.settings.force_in == "step" and all(heads.isfinite().all() for heads in after)


def test_callable_kernels_have_the_same_force(make_model, backward):
    results = []
    for kernel, bandwidth in (("rbf", 2.0), (lambda x, y: torch.exp(-(x - y).square().sum(-1) / 2.0), "paper")):
        model = make_model()
        rule = SVGD(**HELD, kernel=kernel, bandwidth=bandwidth)
        results.append(torch.cat(stepped(model, backward, muon(model), rule)[1]))
    assert close(results[1], results[0], 1e-8)


def test_groups_over_modules(backward):
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)).double()
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
    groups = group_modules(experts)
    before = groups[0].read()
    repel(experts, optimizer, SVGD(**HELD, space="sphere", stepsize=3.0), groups=groups, force_in="step", verbose=False)
    for p in experts.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    force = phi(before, torch.zeros_like(before), alpha=1.0, smoothing=0.0, space="sphere")
    step = -0.5 * torch.ones_like(before)
    assert close(groups[0].read() - before, step + 0.2 * step.norm() * force / force.norm(), 1e-9)


def test_the_ratio_may_be_a_schedule_and_is_reported(make_model, backward):
    model = make_model()
    rule = SVGD(alpha="auto", ratio=lambda step: 0.1 * (step + 1), space="sphere", smoothing=0)
    _, _, handle = stepped(model, backward, muon(model), rule, steps=2, measure_every=1)
    assert [report.ratio for report in handle.report()] == pytest.approx([0.2] * len(handle.groups))
    assert [report.ratio for report in handle.first_report()] == pytest.approx([0.1] * len(handle.groups))


def test_equal_heads_and_steps_of_length_zero_get_no_repulsion(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before, after, _ = stepped(model, backward, optimizer, SVGD(**HELD, stepsize=4.0), force_in="step")
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    group = find_heads(model)[0]
    part = group.slices[0]
    with torch.no_grad():
        part.put(part.parameter(), part.take(part.parameter())[:1].expand(4, -1).clone())
    optimizer.param_groups[0]["lr"] = 0.1
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = group.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert torch.allclose(group.read(), before - 0.1, rtol=0, atol=1e-15)


def test_a_resumed_run_equals_an_uninterrupted_one(make_model, backward):
    whole = make_model()
    _, expected, _ = stepped(whole, backward, muon(whole), "recommended", steps=4)
    model = make_model()
    optimizer = muon(model)
    _, _, handle = stepped(model, backward, optimizer, "recommended", steps=2)
    state = handle.state_dict()
    handle.remove()
    resumed = repel(model, optimizer, verbose=False)
    resumed.load_state_dict(state)
    for index in (2, 3):
        backward(model, index)
        optimizer.step()
    assert all(torch.equal(group.read(), heads) for group, heads in zip(resumed.groups, expected, strict=True))


@pytest.mark.parametrize("name", ["Dion", "Scion", "DistributedShampoo"])
def test_other_optimizers_that_orthogonalise_are_recognised(name, make_model):
    model = make_model()
    optimizer = type(name, (torch.optim.SGD,), {})(matrices(model), lr=0.1)
    assert repel(model, optimizer, verbose=False).settings.force_in == "step"


def test_muon_is_recognised_by_class_and_name(make_model, recwarn):
    model = make_model()
    for optimizer in (muon(model), MyMuon(matrices(model), lr=0.1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MyMuon is an SGD
            handle = repel(model, optimizer, verbose=False)
        assert handle.settings.force_in == "step"
    mixed = MyMuon([{"params": matrices(model), "use_muon": False}], lr=0.1)
    for optimizer in (mixed, torch.optim.AdamW(model.parameters())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert repel(model, optimizer, verbose=False).settings.force_in == "gradient"
    assert repel(model, muon(model), None, verbose=False).settings.force_in == "gradient"
    assert not recwarn.list


def test_rules_without_a_ratio_are_warned_about_under_muon(make_model):
    model = make_model()
    with pytest.warns(
        UserWarning,
        match=r"Muon orthogonalises.*0.03 was measured as 0.1 of one step.*force_in='step' would avoid.*alpha='auto'",
    ):
        repel(model, muon(model), "paper", verbose=False)
    with pytest.warns(UserWarning, match="but cannot be used here: space='logits' is not supported"):
        repel(model, muon(model), "logits", verbose=False)
    with pytest.warns(UserWarning, match="Leave force_in out"):
        repel(model, muon(model), "recommended", force_in="gradient", verbose=False)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot run FSDP2 on a CPU")
def test_sharded_weights_are_refused(make_model, backward):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        repel(model, optimizer, force_in="step", verbose=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer.param_groups[0]["params"] = list(model.parameters())  # as Accelerate does
        backward(model)
        with pytest.raises(UnsupportedWeights, match="force_in='step' does not support sharded weights"):
            optimizer.step()
        with pytest.raises(RuleError, match="force_in='step': sharded weights are not supported"):
            repel(model, torch.optim.AdamW(model.parameters()), force_in="step", verbose=False)
    finally:
        dist.destroy_process_group()


def test_apply_and_clipping_in_the_loop_leave_the_force_alone(make_model, backward):
    """After `apply` gradients are clipped: the step gets shorter, and the force with it."""
    model = make_model()
    plain_model = copy.deepcopy(model)
    for one, rule, place in (
        (plain_model, SVGD(alpha=0.0, smoothing=0, space="sphere"), "gradient"),
        (model, SVGD(**HELD, space="sphere"), "step"),
    ):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        handle = repel(one, optimizer, rule, force_in=place, verbose=False)
        before = [group.read() for group in handle.groups]
        backward(one)
        handle.apply()
        nn.utils.clip_grad_norm_(one.parameters(), 1e-3)
        optimizer.step()
    for group, other, old in zip(find_heads(model), find_heads(plain_model), before, strict=True):
        step = other.read() - old
        assert float((group.read() - other.read()).norm() / step.norm()) == pytest.approx(0.2)


def test_wrong_settings_are_errors(make_model):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuleError, match="force_in='steps': did you mean 'step'"):
        repel(model, optimizer, force_in="steps")
    with pytest.raises(RuleError, match="force_in='step': it needs a rule that holds a ratio"):
        repel(model, optimizer, "paper", force_in="step")
    with pytest.raises(RuleError, match="force_in='step': space='logits' is not supported"):
        repel(model, optimizer, SVGD(alpha="auto", space="logits"), force_in="step", verbose=False)
    assert repel(model, optimizer, verbose=False).attached  # an error leaves nothing behind


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factors", [(1.0, -2.0), (1.0, 2.0, 0.5), (1.0, 1.0, -1.0, -1.0)], ids=str)
@pytest.mark.parametrize(
    ("space", "kernel"),
    [
        ("sphere", "rbf"),
        ("sphere", lambda x, y: torch.exp(-(x - y).square().sum(-1))),
        ("weights", "cosine"),
        ("weights", lambda x, y: nn.functional.cosine_similarity(x, y, dim=-1)),
    ],
    ids=["sphere-rbf", "sphere-callable", "weights-cosine", "weights-callable"],
)
def test_rounding_errors_are_not_scaled_up_to_the_ratio(space, kernel, factors, dtype):
    """Parallel and antiparallel heads have no force on the sphere, nor by a cosine."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.tensor(factors, dtype=dtype)[:, None] * torch.randn(60, dtype=dtype))
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    rule = SVGD("heads", **HELD, kernel=kernel, space=space)
    handle = repel(layer, optimizer, rule, groups=group_stacked(layer, "weight"), force_in="step", verbose=False)
    layer.weight.grad = torch.randn_like(layer.weight)
    expected = layer.weight.detach() - layer.weight.grad
    optimizer.step()
    assert torch.equal(layer.weight, expected)
    assert handle.report()[0].ratio == 0


def test_the_report_of_a_kernel_that_exerts_no_force():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.eye(3, 8))  # orthogonal heads
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    rule = SVGD("heads", **HELD, kernel="hinge", space="sphere")
    handle = repel(layer, optimizer, rule, groups=group_stacked(layer, "weight"), force_in="step", verbose=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight, torch.eye(3, 8) - 1) and handle.report()[0].ratio == 0


def test_a_module_without_a_gradient_stays_where_it_is():
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)).double()
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
    groups = group_modules(experts)
    before = groups[0].read()
    repel(experts, optimizer, SVGD("heads", **HELD, space="sphere"), groups=groups, force_in="step", verbose=False)
    for expert in experts[:2]:
        expert.weight.grad = torch.ones_like(expert.weight)
    optimizer.step()
    after, step = groups[0].read(), 0.5 * torch.tensor([[1.0], [1.0], [0.0]]).double().expand(3, 12)
    force = phi(before, torch.zeros_like(before), alpha=1.0, smoothing=0.0, space="sphere")
    shift = 0.2 * step.norm() * force / force.norm()
    assert torch.equal(after[2], before[2]) and close(after[:2], (before - step + shift)[:2], 1e-9)


def test_joined_heads_with_one_projection_without_a_gradient_are_skipped():
    """As with force_in="gradient"."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.MultiheadAttention(8, 4, kdim=6, vdim=6) for _ in range(2)).double()  # q, k, v apart
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    handle = repel(layers, optimizer, SVGD("heads", **HELD), particle="head", force_in="step", verbose=False)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    layers[0].k_proj_weight.grad = None
    expected = [parameter.detach() - 0.5 for parameter in (layers[0].v_proj_weight, layers[1].v_proj_weight)]
    optimizer.step()
    assert torch.equal(layers[0].v_proj_weight, expected[0]) and not torch.equal(layers[1].v_proj_weight, expected[1])
    assert [group.skipped for group in handle.report()] == [1, 0]

"""The rule runs exactly once per optimizer step: closures, accumulation, missing gradients, lost hooks."""

import copy
import io

import pytest
import torch
from torch import nn

from repulsive import SPOS, SVGD, find_heads, repel
from tests.repulsion.training_loop import RULE, run, same


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_gives_the_same_steps(positional, make_model, backward, plain_step):
    def with_closure(model, optimizer, index):
        closure = lambda: backward(model, index)  # noqa: E731
        loss = optimizer.step(closure) if positional else optimizer.step(closure=closure)
        assert loss.ndim == 0

    one, _ = run(make_model, 3, step=plain_step)
    two, handle = run(make_model, 3, step=with_closure)
    plain, _ = run(make_model, 3, step=plain_step, rule="none")
    assert same(one, two) and not same(one, plain)
    assert handle.steps == 3


def test_lbfgs_evaluates_its_closure_many_times_and_counts_one_step(make_model, backward):
    calls = []

    def step(model, optimizer, index):
        optimizer.step(lambda: calls.append(index) or backward(model, index))

    model, handle = run(make_model, 2, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4), step=step)
    assert handle.steps == 2 and len(calls) > 4
    assert all(p.isfinite().all() for p in model.parameters())


def test_accumulation_repels_the_sum_once(make_model, backward, plain_step):
    def accumulated(model, optimizer, index):
        optimizer.zero_grad()
        for _ in range(4):
            backward(model, index, scale=0.25, zero=False)
        optimizer.step()

    one, _ = run(make_model, 3, step=plain_step)
    two, handle = run(make_model, 3, step=accumulated)
    assert handle.steps == 3
    assert same(one, two, 1e-9)


def test_a_group_without_gradient_is_skipped_and_counted(make_model, backward):
    def step(model, optimizer, index):
        backward(model, index)
        if index == 1:
            model.stack.layers[0].self_attn.in_proj_weight.grad = None
        optimizer.step()

    _, handle = run(make_model, 3, step=step)
    skipped = {line.name: line.skipped for line in handle.report()}
    assert skipped["stack.layers.0.self_attn.q"] == 1 and skipped["stack.layers.1.self_attn.q"] == 0
    assert handle.steps == 3


def test_frozen_heads_with_gradients_of_zeros_are_skipped(make_model, backward):
    """As after `zero_grad(set_to_none=False)`: repulsion alone would move heads that are meant to stay."""
    seen = []

    def step(model, optimizer, index):
        frozen = model.stack.layers[0].self_attn.in_proj_weight
        backward(model, index)
        if index == 2:
            frozen.grad.zero_()
            frozen.requires_grad_(False)
            optimizer.register_step_pre_hook(lambda *_: seen.append(frozen.grad.clone()))
        optimizer.step()

    _, handle = run(make_model, 3, rule=SVGD("heads", alpha=0.5, smoothing=0), step=step)
    assert len(seen) == 1 and not seen[0].any() and handle.steps == 3
    skipped = {line.name: line.skipped for line in handle.report()}
    assert skipped["stack.layers.0.self_attn.q"] == 1 and skipped["stack.layers.1.self_attn.q"] == 0


def test_a_step_between_those_of_the_rule_does_not_count_if_all_heads_are_frozen(make_model, backward):
    def step(model, optimizer, index):
        backward(model, index)
        for layer in model.stack.layers:
            layer.self_attn.in_proj_weight.requires_grad_(index == 0)
            if index:
                layer.self_attn.in_proj_weight.grad.zero_()
        if index:
            with pytest.warns(UserWarning, match="no selected head had a gradient"):
                optimizer.step()
        else:
            optimizer.step()

    _, handle = run(make_model, 2, rule=SVGD("heads", alpha=0.5, smoothing=0, act_every=3), step=step)
    assert handle.steps == 1


def test_a_sparse_gradient_is_refused_by_name(make_model, backward):
    def step(model, optimizer, index):
        backward(model, index)
        weight = model.stack.layers[0].self_attn.in_proj_weight
        weight.grad = None
        weight.grad = torch.zeros(48, 16, dtype=torch.float64).to_sparse()
        optimizer.step()

    with pytest.raises(TypeError, match=r"stack\.layers\.0\.self_attn\.in_proj_weight.*dense"):
        run(make_model, 1, step=step)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_hooks_lost_by_copying_come_back_with_the_state(how, make_model, backward, plain_step):
    """A copied optimizer has no hooks: call repel again and load the state; the noise continues unchanged."""
    rule = SPOS(0.1, 0.5, 100.0)
    whole, _ = run(make_model, 6, rule=rule, step=plain_step, seed=5)
    model, handle = run(make_model, 3, rule=rule, step=plain_step, seed=5)
    state, saved = handle.state_dict(), copy.deepcopy(handle.optimizer.state_dict())
    if how == "deepcopy":
        pair = copy.deepcopy((model, handle.optimizer))
    else:
        buffer = io.BytesIO()
        torch.save((model, handle.optimizer), buffer)
        buffer.seek(0)
        pair = torch.load(buffer, weights_only=False)
    model, optimizer = pair
    assert not optimizer.__dict__.get("_optimizer_step_pre_hooks")
    fresh = repel(model, optimizer, rule, verbose=False)
    fresh.load_state_dict(state)
    optimizer.load_state_dict(saved)
    for index in range(3, 6):
        plain_step(model, optimizer, index)
    assert same(whole, model)
    assert fresh.steps == 6


def test_loading_a_state_attaches_again(make_model, backward, plain_step):
    model, handle = run(make_model, 2, step=plain_step)
    handle.optimizer._optimizer_step_pre_hooks.clear()
    handle.optimizer._optimizer_step_post_hooks.clear()
    assert not handle.attached
    handle.load_state_dict(handle.state_dict())
    assert handle.attached
    plain_step(model, handle.optimizer, 2)
    assert handle.steps == 3


def test_half_precision_parameters(make_model, backward):
    """bf16 weights: the rule is computed in float32 and rounded once."""
    model = make_model(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, RULE, verbose=False)
    backward(model)
    group = handle.groups[0]
    part = group.slices[0]
    expected = RULE.gradient(group.read().float(), part.take(part.parameter().grad).float())
    handle.apply()
    found = part.take(part.parameter().grad)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.to(torch.bfloat16))


def test_inside_autocast(make_model, backward):
    """A loop that steps inside its autocast block gets the same update."""

    def step(model, optimizer, index):
        backward(model, index)
        optimizer.step()

    def cast(model, optimizer, index):
        backward(model, index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()

    make = lambda: make_model(dtype=torch.float32)  # noqa: E731
    assert same(run(make, 2, step=step)[0], run(make, 2, step=cast)[0])


def test_schedulers_and_learning_rate_zero(make_model, backward):
    """A warm-up starts at learning rate 0, where the noise must not become infinite."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 2))
    handle = repel(model, optimizer, SPOS(0.1, 0.5, 100.0), verbose=False)
    for index in range(3):
        backward(model, index)
        optimizer.step()
        schedule.step()
    assert handle.steps == 3
    assert all(p.isfinite().all() for p in model.parameters())


class Quantised(torch.optim.Optimizer):
    """A custom optimizer that only reads `.grad`."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


def test_a_custom_optimizer(make_model, plain_step):
    one, _ = run(make_model, 2, lambda p: torch.optim.SGD(p, lr=0.2), step=plain_step)
    two, handle = run(make_model, 2, lambda p: Quantised(p, lr=0.2), step=plain_step)
    assert handle.steps == 2
    assert same(one, two, 1e-12)


def test_an_error_inside_step_does_not_lose_the_next(make_model, backward):
    class Fragile(Quantised):
        def step(self, closure=None):
            if closure == "break":
                raise KeyboardInterrupt
            super().step()

    model = make_model()
    optimizer = Fragile(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, RULE, verbose=False)
    backward(model)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step("break")
    backward(model)
    drive = model.stack.layers[0].self_attn.in_proj_weight.grad.clone()
    optimizer.step()
    assert handle.steps == 1
    assert not torch.equal(drive, model.stack.layers[0].self_attn.in_proj_weight.grad)


def test_modules_with_buffers_only_next_to_heads(make_model):
    model = nn.ModuleDict({"a": make_model(), "norm": nn.BatchNorm1d(3, affine=False)})
    handle = repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    assert len(handle.groups) == 6


def test_a_single_head_is_warned_about():
    model = nn.TransformerEncoderLayer(8, 1, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="3 of 3 groups have one head, which has nothing to be repelled from"):
        repel(model, optimizer, RULE, groups=find_heads(model), verbose=False)

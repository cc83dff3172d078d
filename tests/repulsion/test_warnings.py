"""Warnings and errors about single heads, plain SGD and weight decay, strong repulsion, and heads trained later."""

import warnings

import pytest
import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, SelectionError, find_heads, repel
from repulsive.particles import CollapsedHeads

SLOW = pytest.mark.filterwarnings("ignore:heads get about")


def texts(caught) -> list[str]:
    return [str(one.message) for one in caught]


def attach(model, optimizer, rule, **options):
    """Call `repel`; return the handle and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = repel(model, optimizer, rule, verbose=False, **options)
    return handle, texts(caught)


def train(handle, model, backward, steps: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(steps):
            backward(model, index)
            handle.optimizer.step()
    return texts(caught)


# -- one head ---------------------------------------------------------------------------------------------------------


def test_one_head_everywhere_is_an_error(make_model):
    model = make_model(heads=1)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(SelectionError, match="6 of 6 groups have one head, which has nothing to be repelled from"):
        repel(model, optimizer, verbose=False)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(("rule", "given"), [(None, False), (SGLD(), False), (SVGD(), True)])
def test_one_head_on_purpose_is_a_warning(rule, given, make_model):
    model = make_model(heads=1)
    groups = {"groups": find_heads(model)} if given else {}
    _, messages = attach(model, torch.optim.Adam(model.parameters()), rule, **groups)
    assert len(messages) == 1 and "6 of 6 groups have one head" in messages[0]


def test_one_head_in_some_layers_is_a_warning():
    model = nn.ModuleList([nn.MultiheadAttention(8, 1), nn.MultiheadAttention(8, 2)])
    _, messages = attach(model, torch.optim.Adam(model.parameters()), SVGD())
    assert len(messages) == 1 and messages[0].startswith("3 of 6 groups have one head")


# -- optimizers that do not compensate for smaller gradients ----------------------------------------------------------


def test_the_numbers_in_the_warning_about_plain_sgd_are_right(make_model, backward):
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    _, messages = attach(model, optimizer, SVGD(stepsize=0.1, alpha=0.0, smoothing=0))
    assert messages == [
        "heads get about 0.025 of their gradient (stepsize 0.1, 4 heads), and SGD does not rescale it: with lr=0.2 "
        "they learn as with 0.005. Choose stepsize=4 to keep the size of gradients, or Adam"
    ]
    slow = torch.optim.SGD(plain.parameters(), lr=0.005)
    for one, own in ((model, optimizer), (plain, slow)):
        backward(one)
        own.step()
    weights = [one.stack.layers[0].self_attn.in_proj_weight for one in (model, plain)]
    assert torch.allclose(*weights, rtol=1e-12)
    assert attach(plain, torch.optim.SGD(plain.parameters(), lr=0.2), None)[1] == []


@pytest.mark.parametrize(
    ("kind", "rule", "warned"),
    [
        (torch.optim.Adam, SVGD(), True),
        (torch.optim.RMSprop, SPOS(), True),
        (torch.optim.Adam, SVGD(stepsize=4.0), False),
        (torch.optim.Adam, SGLD(), False),
        (torch.optim.Adam, None, False),
        (torch.optim.AdamW, SVGD(), False),
    ],
)
def test_coupled_weight_decay(kind, rule, warned, make_model):
    model = make_model()
    _, messages = attach(model, kind(model.parameters(), lr=1e-3, weight_decay=0.01), rule, noise_in="gradient")
    text = f"heads get about 0.025 of their gradient, and {kind.__name__} adds weight_decay=0.01 to it: for heads that "
    assert [one.startswith(text + "is like 0.4. Choose AdamW, or stepsize=4") for one in messages] == [True] * warned


def test_adam_that_decouples_its_decay_is_fine(make_model):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
    optimizer.param_groups[0]["decoupled_weight_decay"] = True  # an argument of newer versions of torch
    assert attach(model, optimizer, SVGD())[1] == []


# -- repulsion that stays stronger than the loss ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "step", "remedy"),
    [
        (SVGD(alpha=1e6, space="sphere", smoothing=0), 110, "a smaller alpha, or rule='recommended', which holds the"),
        (SVGD(alpha="auto", ratio=5.0, space="sphere", smoothing=0), 140, "a smaller ratio"),
    ],
    ids=["far above, two measurements", "above, five"],
)
def test_a_ratio_above_one_is_warned_about_once_with_the_remedy(rule, step, remedy, make_model, backward):
    model = make_model()
    handle, _ = attach(model, torch.optim.SGD(model.parameters(), lr=1e-12), rule, measure_every=10)
    handle.steps = 80
    messages = train(handle, model, backward, 61)  # measured at 80, 90, ..., 140
    assert len(messages) == 1 and messages[0].startswith(f"step {step}: repulsion is stronger than the loss")
    assert f"Choose {remedy}" in messages[0]
    assert train(handle, model, backward, 30) == [] and texts_of(handle.remove) == []


def texts_of(function) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return texts(caught)


def test_one_small_ratio_among_large_ones_does_not_prevent_the_warning(make_model, backward):
    model = make_model()
    rule = SVGD(alpha="auto", ratio=lambda step: 1e-6 if step == 120 else 5.0, space="sphere", smoothing=0)
    handle, _ = attach(model, torch.optim.SGD(model.parameters(), lr=1e-12), rule, measure_every=10)
    handle.steps = 100
    assert [one[:9] for one in train(handle, model, backward, 41)] == ["step 140:"]


@pytest.mark.parametrize("rule", [SVGD(alpha=0.01), SVGD(alpha="auto", ratio=1.0)], ids=["small", "as asked"])
def test_a_ratio_up_to_one_gives_no_warning(rule, make_model, backward):
    model = make_model()
    handle, _ = attach(model, torch.optim.SGD(model.parameters(), lr=1e-12), rule, measure_every=5)
    handle.steps = 500
    assert train(handle, model, backward, 31) == [] and texts_of(handle.remove) == []


def test_a_large_ratio_before_step_100_gives_no_warning(make_model, backward):
    model = make_model()
    rule = SVGD(alpha=lambda step: 0.0 if step >= 100 else 1e6, space="sphere", smoothing=0)
    handle, _ = attach(model, torch.optim.SGD(model.parameters(), lr=1e-12), rule, measure_every=1)
    handle.steps = 70
    messages = train(handle, model, backward, 30)
    assert messages == [] and all(one.ratio > 1 for one in handle.report())
    assert train(handle, model, backward, 5) == [] and texts_of(handle.remove) == []


@pytest.mark.parametrize(
    ("rule", "measure_every"),
    [(SVGD(alpha="auto", ratio=5.0, space="sphere", smoothing=0), 5), (SVGD(alpha=1e6, space="sphere"), 100)],
    ids=["above 1, three measurements", "far above, one measurement"],
)
def test_a_short_training_is_warned_about_at_its_end(rule, measure_every, make_model, backward):
    model = make_model()
    handle, _ = attach(model, torch.optim.SGD(model.parameters(), lr=1e-12), rule, measure_every=measure_every)
    handle.steps = 90
    assert train(handle, model, backward, 21) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.remove()
    assert len(caught) == 1 and str(caught[0].message).startswith("step 111: repulsion is stronger than the loss")
    assert caught[0].filename == __file__
    assert texts_of(handle.remove) == []


# -- heads that grow --------------------------------------------------------------------------------------------------


def grow(model, rule, backward) -> list:
    """Make weights 1.5 times as large in each of four steps with a measurement; return the warnings."""
    handle, _ = attach(model, torch.optim.Adam(model.parameters(), lr=1e-12), rule, measure_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(5):
            backward(model, index)
            handle.optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
    return caught


@pytest.mark.parametrize("rule", ["paper", "kernel-free", SVGD(alpha="auto", ratio=0.1)], ids=str)
def test_heads_that_move_far_apart_are_warned_about_once(rule, make_model, backward):
    caught = grow(make_model(), rule, backward)
    assert len(caught) == 1 and caught[0].filename == __file__
    message = str(caught[0].message)
    assert message.startswith("step 3: heads are 3.4 times as far apart") and "rule='sphere'" in message


@pytest.mark.parametrize("rule", ["sphere", SVGD(alpha=0.0), "sgld"], ids=str)
def test_rules_that_do_not_repel_weights_say_nothing_about_growth(rule, make_model, backward):
    assert texts(grow(make_model(), rule, backward)) == []


# -- heads that are trained later -------------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize("later", ["unfrozen", "added"])
def test_heads_that_join_the_training_are_named_once(later, make_model, backward):
    model = make_model()
    first = model.stack.layers[0].self_attn.in_proj_weight
    first.requires_grad_(later != "unfrozen")
    trained = [p for p in model.parameters() if later == "unfrozen" or p is not first]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    handle, messages = attach(model, optimizer, SVGD(), measure_every=2)
    assert any("3 of 6 groups of heads are left out" in one for one in messages)
    assert train(handle, model, backward, 3) == []
    if later == "unfrozen":
        first.requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [first]})
    messages = train(handle, model, backward, 6)
    assert len(messages) == 1 and "3 groups of heads were unfrozen or added to the optimizer after repel" in messages[0]
    assert "stack.layers.0.self_attn.q" in messages[0] and "repel again" in messages[0]
    handle.remove()
    handle, _ = attach(model, optimizer, SVGD())
    assert len(handle.groups) == 6


# -- the line that a warning names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "step of a scheduled optimizer", "apply"])
def test_a_warning_names_the_line_of_the_training_loop(call, make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    if "scheduled" in call:
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps `step` in a function of torch
    with torch.no_grad():
        model.stack.layers[0].self_attn.in_proj_weight.fill_(1.0)
    handle, _ = attach(model, optimizer, "paper")
    backward(model, 0)
    with pytest.warns(CollapsedHeads) as caught:
        (handle.apply if call == "apply" else optimizer.step)()
    assert {one.filename for one in caught} == {__file__}


def test_a_warning_names_the_line_of_a_with_block(make_model):
    model = make_model()
    with (
        pytest.warns(UserWarning, match="never took a step") as caught,
        repel(model, torch.optim.Adam(model.parameters()), verbose=False),
    ):
        pass
    assert [one.filename for one in caught] == [__file__]

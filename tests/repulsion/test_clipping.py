"""Gradients are clipped before or after the rule, as `order` says."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from repulsive import repel
from tests.repulsion.training_loop import RULE, run, same


def test_clip_order(make_model, backward):
    """Clipping in the loop comes before the rule; the handle clips before or after it, as `order` says."""

    def by_hand(order):
        def step(model, optimizer, index):
            backward(model, index)
            if order == "clip-repel":
                clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

        return step

    def unclipped(model, optimizer, index):
        backward(model, index)
        optimizer.step()

    def repel_then_clip(model, optimizer, index):
        backward(model, index)
        handle_of[id(optimizer)].apply()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    handle_of = {}
    by_loop, _ = run(make_model, 3, step=by_hand("clip-repel"))
    by_handle, _ = run(make_model, 3, step=unclipped, max_norm=0.05, order="clip-repel")
    assert same(by_loop, by_handle, 1e-12)

    after, _ = run(make_model, 3, step=unclipped, max_norm=0.05, order="repel-clip")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    handle = handle_of[id(optimizer)] = repel(model, optimizer, RULE, verbose=False)
    for index in range(3):
        repel_then_clip(model, optimizer, index)
    assert handle.steps == 3, "apply() and the hook together are one application"
    assert same(after, model, 1e-12)
    assert not same(after, by_loop, 1e-6)


def test_max_norm_also_clips_where_no_head_has_a_gradient(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = repel(model, optimizer, RULE, verbose=False, max_norm=1e-3)
    for group in handle.groups:
        for parameter in group.parameters():
            parameter.requires_grad_(False)
    backward(model, 0)
    with pytest.warns(UserWarning, match="no selected head had a gradient"):
        optimizer.step()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert norms and torch.stack(norms).norm() <= 1.0001e-3

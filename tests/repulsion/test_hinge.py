"""The hinge kernel in training: it separates duplicate heads, and does not affect heads that differ."""

import pytest
import torch

from repulsive import SVGD, repel


def duplicate(model, noise: float) -> None:
    """Make all q heads of a layer nearly equal, and all k heads."""
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.stack.layers:
            rows = layer.self_attn.in_proj_weight.view(3, 4, 4, 16)  # q, k, v; heads; features; width
            bias = layer.self_attn.in_proj_bias.view(3, 4, 4)
            rows[:2] = rows[:2, :1] + noise * torch.randn(2, 4, 4, 16, dtype=rows.dtype)
            bias[:2] = bias[:2, :1].clone()


def largest_after(make_model, backward, space: str, alpha: float) -> list[float]:
    """The largest cosine of each group of duplicates after 60 steps."""
    model = make_model()
    duplicate(model, 0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rule = SVGD(stepsize=4.0, alpha=alpha, kernel="hinge", space=space, smoothing=0)
    handle = repel(model, optimizer, rule, parts="qk", measure_every=5, verbose=False)
    for index in range(61):
        backward(model, index)
        optimizer.step()
    assert min(line.largest for line in handle.first_report()) > 0.95
    return [line.largest for line in handle.report()]


@pytest.mark.parametrize("space", ["sphere", "logits"])
def test_duplicates_separate_only_with_repulsion(space, make_model, backward):
    assert max(largest_after(make_model, backward, space, alpha=10.0)) < 0.85
    assert min(largest_after(make_model, backward, space, alpha=0.0)) > 0.9


def test_heads_that_differ_train_exactly_as_without_repulsion(make_model, backward):
    found = []
    for alpha in (10.0, 0.0):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        rule = SVGD(alpha=alpha, kernel="hinge", space="sphere", smoothing=0)
        handle = repel(model, optimizer, rule, measure_every=1, verbose=False)
        for index in range(5):
            backward(model, index)
            optimizer.step()
        assert max(line.largest for line in handle.report()) < 0.5
        assert all(line.repulsion == 0 for line in handle.report())
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)

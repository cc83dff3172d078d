"""A training loop with a handle, and a comparison of the weights of two models."""

import torch

from repulsive import SVGD, repel

RULE = SVGD(alpha=0.5)


def run(make_model, steps, make_optimizer=None, rule=RULE, step=None, **options):
    """Train a fresh model; `step(model, optimizer, index)` does one step."""
    model = make_model()
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9))
    optimizer = make_optimizer(model.parameters())
    handle = repel(model, optimizer, rule, verbose=False, **options) if rule != "none" else None
    for index in range(steps):
        step(model, optimizer, index)
    return model, handle


def same(a, b, tolerance=0.0):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in pairs)

"""`torch.set_default_device` and `set_default_dtype`: the library chooses device and type of its own tensors."""

import contextlib

import pytest
import torch
from torch import nn

from repulsive import SPOS, SVGD, HeadMonitor, Heads, repel


@contextlib.contextmanager
def other_default_device():
    """Set a default device that is not the model's; tensors on "meta" have no values, so that any use raises."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def other_default_dtype():
    """Set a default type in which neither positions of tokens nor random numbers are accurate."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


OTHER_DEFAULTS = [other_default_device, other_default_dtype]


def trained(make_model, backward, context, rule, settings):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with context():
        handle = repel(model, optimizer, rule, verbose=False, measure_every=1, **settings)
    for index in range(2):
        with context() if context is other_default_dtype else contextlib.nullcontext():
            backward(model, index)
        with context():
            optimizer.step()
    with context():
        assert all(line.ratio > 0 for line in handle.report()) and str(handle)
        handle.load_state_dict(handle.state_dict())
        handle.remove()
    return list(model.parameters())


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("paper", {"particle": "head"}),
        ("sphere", {"example_inputs": torch.ones(2, 5, 16, dtype=torch.float64)}),
        (SPOS(), {}),
        (SPOS(), {"noise_in": "gradient"}),
        (SVGD("heads", alpha="auto", space="logits", circuits="qk+ov", tokens=16), {}),
    ],
    ids=["weights", "example", "noise", "noise in the gradient", "logits"],
)
@pytest.mark.parametrize("context", OTHER_DEFAULTS)
def test_repel_does_not_depend_on_defaults_of_torch(context, rule, settings, make_model, backward):
    expected = trained(make_model, backward, contextlib.nullcontext, rule, settings)
    found = trained(make_model, backward, context, rule, settings)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def measured(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    heads = Heads(model, x)
    spaces = ("logits", "ov", "attention", "outputs", "cka")
    scores = [heads.similarity([x[:3], x[3:]], space, twins=0)[0] for space in spaces]
    results = [score.cosine for score in scores] + [
        torch.tensor(score.permuted.means, dtype=torch.float64, device="cpu") for score in scores
    ]
    results.append(heads.importance([x], lambda model, x: model(x).square().mean()))
    with heads.ablated([(0, 1)]):
        results.append(model(x))
    return results


@pytest.mark.parametrize("context", OTHER_DEFAULTS)
def test_diagnostics_do_not_depend_on_defaults_of_torch(context, make_model):
    model, x = make_model(), torch.randn(6, 200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = measured(model, x)
    with context():
        found = measured(model, x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    monitor = HeadMonitor(model, every=1)
    with context():
        model.train()(x)
    assert len(monitor.history) == 1

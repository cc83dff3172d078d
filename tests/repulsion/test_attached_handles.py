"""Attached handles: several on one optimizer, removal, and what a handle keeps."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from repulsive import SGLD, OptimizerError, RuleError, repel
from tests.repulsion.unchanged import untouched


def test_two_handles_need_different_heads(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = repel(model, optimizer, layers=[0], verbose=False)
    with pytest.raises(OptimizerError, match="already"):
        repel(model, optimizer, verbose=False)
    with pytest.raises(OptimizerError, match="already"):
        repel(model, optimizer, layers=[0], verbose=False)
    second = repel(model, optimizer, SGLD(1.0, 0.0), layers=[1], verbose=False)
    backward(model)
    optimizer.step()
    assert (first.steps, second.steps) == (1, 1)
    first.remove()
    third = repel(model, optimizer, layers=[0], verbose=False)
    assert third.attached and not first.attached


def test_remove_and_with_leave_no_trace(make_model, backward):
    model, plain = make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    with repel(model, optimizers[0], verbose=False) as handle:
        backward(model)
        optimizers[0].step()
    assert untouched(optimizers[0]) and not handle.attached
    handle.remove()  # a second call does nothing
    model.load_state_dict(plain.state_dict())
    optimizers[0].state.clear()
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        backward(m)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_handle_that_never_fired_warns(make_model):
    model = make_model()
    handle = repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    with pytest.warns(UserWarning, match="never took a step"):
        handle.remove()


def test_nothing_keeps_a_finished_optimizer_alive(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repel(model, optimizer, verbose=False)  # only the hooks keep the handle alive
    backward(model)
    optimizer.step()
    watched = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watched() is None


def _encoder(layers: int = 2) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True), layers)


def test_a_removed_handle_changes_nothing():
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, verbose=False)
    model(torch.randn(2, 5, 16)).sum().backward()
    optimizer.step()
    handle.remove()
    with pytest.raises(OptimizerError, match="not attached"):
        handle.apply()


@pytest.mark.parametrize(("first", "second"), [(1.0, None), (None, 1.0), (1.0, 1.0)])
def test_two_handles_do_not_clip_the_same_gradients(first, second):
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, layers=[0], max_norm=first, verbose=False)
    with pytest.raises(OptimizerError, match="each would clip"):
        repel(model, optimizer, layers=[1], max_norm=second, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.remove()
    repel(model, optimizer, layers=[1], max_norm=second, verbose=False)


def test_the_number_of_cached_updates_is_limited():
    model = _encoder(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = repel(model, optimizer, verbose=False)
    for number in range(1, 64):  # every subset of six layers
        optimizer.zero_grad()
        for index, layer in enumerate(model.layers):
            if number >> index & 1:
                layer(torch.randn(2, 3, 16)).square().sum().backward()
        optimizer.step()
    assert handle.steps == 63 and len(handle._updates) <= 16


@pytest.mark.parametrize("seed", [None, 1.5, "1"])
def test_a_seed_is_a_whole_number(seed):
    numpy = pytest.importorskip("numpy")
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuleError, match="whole number"):
        repel(model, optimizer, seed=seed, verbose=False)
    handle = repel(model, optimizer, seed=numpy.int64(3), layers=numpy.arange(1), verbose=False)
    assert type(handle.state_dict()["seed"]) is int and {g.layer for g in handle.groups} == {0}

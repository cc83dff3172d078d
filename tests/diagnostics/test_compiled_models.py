"""Diagnostics of models whose compiled code has run before: it would skip the hooks, or keep old ones."""

import pytest
import torch
from torch import nn

from repulsive import Heads
from tests.repulsion.logits.small_decoder import Decoder

IDS = torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(0))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double().eval()


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def by_layer(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def forward_only(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, in_place, by_layer, forward_only])
def test_a_compiled_model_that_has_run_gives_the_numbers_of_the_plain_one(compiled):
    plain, model = decoder(), compiled(decoder())
    before = model(IDS)
    with torch.no_grad():
        model(IDS)
    expected, heads = Heads(plain), Heads(model)
    for space in ("attention", "outputs", "logits", "ov"):
        one, other = (each.similarity([IDS], space, twins=0)[1].cosine for each in (heads, expected))
        torch.testing.assert_close(one, other)
    one, other = (
        each.importance([IDS], lambda model, ids: model(ids).sin().sum(), normalise=False) for each in (heads, expected)
    )
    torch.testing.assert_close(one, other)
    for chosen, settings in (([(0, 1)], {}), ([(1, 2)], {}), ([(1, 0)], {"mode": "mean", "source": IDS})):
        with heads.ablated(chosen, **settings):
            found = model(IDS)
        with expected.ablated(chosen, **settings):
            wanted = plain(IDS)
        torch.testing.assert_close(found, wanted)
        assert not torch.allclose(found, before)
    torch.testing.assert_close(model(IDS), before)

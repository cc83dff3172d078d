"""Heads that are left out are named: frozen, not in the optimizer, or of unknown layout."""

import pytest
import torch
from torch import nn

from repulsive import OptimizerError, repel


def test_frozen_groups_are_left_out_with_a_warning(make_model, backward):
    model = make_model()
    model.stack.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"3 of 6 groups .*stack\.layers\.0\.self_attn\.q \(frozen\)"):
        handle = repel(model, optimizer, verbose=False)
    assert {group.layer for group in handle.groups} == {1}
    backward(model)
    optimizer.step()
    assert handle.steps == 1


def test_parameters_outside_the_optimizer_are_left_out_with_a_warning(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.stack.layers[1].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="not in the optimizer"):
        handle = repel(model, optimizer, verbose=False)
    assert {group.layer for group in handle.groups} == {1}


def test_frozen_heads_alone_are_refused_with_the_remedy(make_model):
    model = make_model().requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"\(frozen\)\. Unfreeze them; with LoRA, .*target_modules"):
        repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)


class OddAttention(nn.Module):
    """Attention of an unknown class with unusual names of projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_attention = nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})


def test_attention_that_is_left_out_is_named(capsys):
    """Known attention, modules that contain it, and layers that were not selected are not named."""
    model = nn.ModuleDict({"known": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2), "odd": OddAttention()})
    repel(model, torch.optim.SGD(model.parameters(), lr=0.1), layers="first")
    told = "left out, as their head layout is unknown: odd (OddAttention); example_inputs may help"
    assert told in capsys.readouterr().err
    known = model["known"]
    repel(known, torch.optim.SGD(known.parameters(), lr=0.1), layers="first", particle="head")
    assert "left out" not in capsys.readouterr().err


def test_a_layer_that_shares_the_weights_of_another_is_not_named_as_left_out(capsys):
    model = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(3))
    model[2].in_proj_weight = model[0].in_proj_weight
    repel(model, torch.optim.Adam(model.parameters()))
    shown = capsys.readouterr().err
    assert "2 attention layers" in shown and "left out" not in shown

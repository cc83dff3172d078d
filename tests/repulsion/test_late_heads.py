"""Heads that are added to the model or unfrozen after `repel`: one warning, as soon as they train."""

import copy
import warnings

import pytest
import torch
from torch import nn

from repulsive import SVGD, find_heads, repel
from repulsive.particles.schedules import Until
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*groups of heads are left out:UserWarning")


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def grow(model, optimizer):
    """Append a layer, and train it."""
    model.layers.append(copy.deepcopy(model.layers[0]))
    optimizer.add_param_group({"params": list(model.layers[-1].parameters())})


def step(model, optimizer, steps=1):
    """Take steps; return messages about late heads, and check that they point to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3, 8)).square().mean().backward()
            optimizer.step()
    late = [one for one in caught if "after repel" in str(one.message)]
    assert all(one.filename == __file__ for one in late)
    return [str(one.message) for one in late]


def make(rule="recommended", **options):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, repel(model, optimizer, rule, verbose=False, **options)


@pytest.mark.parametrize("given", [False, True])
def test_a_layer_that_is_added_later_is_named_once(given):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"groups": find_heads(model)} if given else {}
    repel(model, optimizer, verbose=False, **options)
    assert step(model, optimizer, 3) == []
    grow(model, optimizer)
    [message] = step(model, optimizer)
    assert "3 groups of heads" in message and "layers.2.self_attn.q" in message and "repel again" in message
    grow(model, optimizer)
    assert step(model, optimizer, 5) == []


def test_a_layer_is_named_if_the_model_was_given_in_a_wrapper_that_is_gone():
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    repel(torch.compile(model), optimizer, verbose=False)
    assert step(model, optimizer, 2) == []
    grow(model, optimizer)
    [message] = step(model, optimizer)
    assert "layers.2.self_attn.q" in message


@pytest.mark.parametrize("given", [False, True])
def test_other_parameters_and_unselected_layers_are_not_reported(given):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"groups": find_heads(model, layers="first")} if given else {"layers": "first"}
    repel(model, optimizer, verbose=False, **options)
    step(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    grow(model, optimizer)
    assert step(model, optimizer, 2) == []


class Unknown(nn.Module):
    """Attention of a class that no table lists: its heads are a guess from the names of its parts."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_heads_that_are_a_guess_are_not_reported():
    """`repel` would refuse them without an example."""
    model, optimizer, _ = make()
    model.layers.append(Unknown())
    assert {group.proof for group in find_heads(model) if group.name.startswith("layers.2")} == {"guess"}
    optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
    assert step(model, optimizer, 2) == []


def test_heads_of_another_handle_are_not_reported():
    model, optimizer, _ = make()
    step(model, optimizer)
    grow(model, optimizer)
    repel(model, optimizer, layers=[2], verbose=False)
    assert step(model, optimizer, 2) == []


def test_no_report_after_the_last_step_with_repulsion():
    model, optimizer, _ = make(SVGD("heads", Until(2, 0.5), smoothing=0))
    step(model, optimizer, 2)
    grow(model, optimizer)
    assert step(model, optimizer, 3) == []


def test_unfrozen_heads_are_reported_in_their_first_step():
    """Also between two measurements, which a short run may not have."""
    model = Model()
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    repel(model, optimizer, verbose=False)
    assert step(model, optimizer, 2) == []
    model.layers[0].requires_grad_(True)
    [message] = step(model, optimizer)
    assert "3 groups of heads were unfrozen" in message and "layers.0.self_attn.q" in message
    assert step(model, optimizer, 3) == []

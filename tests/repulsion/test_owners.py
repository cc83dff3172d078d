"""Parameters are looked up by name at every step, wherever their module keeps them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from repulsive import UnsupportedWeights
from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.owners import Owners


@pytest.fixture
def layers():
    return nn.ModuleDict({"packed": nn.Linear(4, 6, bias=False), "other": nn.Linear(4, 2, bias=False)})


@pytest.fixture
def owners(layers):
    rows = torch.arange(6).view(3, 2, 1)
    parts = [HeadSlice(layers["packed"], "weight", "packed.weight", table) for table in rows]
    return Owners([*parts, HeadSlice(layers["other"], "weight", "other.weight", torch.arange(2).view(2, 1))])


def test_one_owner_per_parameter(layers, owners):
    assert [part.parameter_name for part in owners.parts] == ["packed.weight", "other.weight"]
    parameters, gradients = owners.look()
    assert parameters[0] is layers["packed"].weight and parameters[1] is layers["other"].weight
    assert gradients == [None, None]
    again = HeadSlice(layers["other"], "weight", "other.weight", torch.arange(2).view(1, 2))
    assert owners.number(again) == 1


def test_replaced_parameters_are_followed(layers, owners):
    layers["packed"].weight = nn.Parameter(torch.ones(6, 4))
    layers["packed"].weight.grad = torch.zeros(6, 4)
    parameters, gradients = owners.look()
    assert parameters[0] is layers["packed"].weight and gradients[0] is layers["packed"].weight.grad
    other = nn.Linear(4, 2, bias=False)
    layers["other"]._parameters = other._parameters  # the whole table of a module, too
    assert owners.look()[0][1] is other.weight


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_weight_that_is_computed(layers, owners):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    plain = layers["other"].weight
    parametrize.register_parametrization(layers["other"], "weight", Twice())
    assert torch.equal(owners.look()[0][1], 2 * plain)


@pytest.mark.parametrize(
    "remove", [lambda layer: delattr(layer, "weight"), lambda layer: setattr(layer, "weight", None)]
)
def test_a_weight_that_is_gone(layers, owners, remove):
    remove(layers["other"])
    with pytest.raises(UnsupportedWeights, match=r"other\.weight: no tensor of that name"):
        owners.look()

"""Look up parameters by name at every step, also replaced and computed ones."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from repulsive import UnsupportedWeights
from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.parameter_lookup import ParameterLookup


@pytest.fixture
def layers():
    return nn.ModuleDict({"packed": nn.Linear(4, 6, bias=False), "other": nn.Linear(4, 2, bias=False)})


@pytest.fixture
def lookup(layers):
    rows = torch.arange(6).view(3, 2, 1)
    parts = [HeadSlice(layers["packed"], "weight", "packed.weight", table) for table in rows]
    return ParameterLookup([*parts, HeadSlice(layers["other"], "weight", "other.weight", torch.arange(2).view(2, 1))])


def test_one_entry_per_parameter(layers, lookup):
    assert [part.parameter_name for part in lookup.parts] == ["packed.weight", "other.weight"]
    parameters, gradients = lookup.current()
    assert parameters[0] is layers["packed"].weight and parameters[1] is layers["other"].weight
    assert gradients == [None, None]
    again = HeadSlice(layers["other"], "weight", "other.weight", torch.arange(2).view(1, 2))
    assert lookup.index_of(again) == 1


def test_replaced_parameters_are_followed(layers, lookup):
    layers["packed"].weight = nn.Parameter(torch.ones(6, 4))
    layers["packed"].weight.grad = torch.zeros(6, 4)
    parameters, gradients = lookup.current()
    assert parameters[0] is layers["packed"].weight and gradients[0] is layers["packed"].weight.grad
    other = nn.Linear(4, 2, bias=False)
    layers["other"]._parameters = other._parameters  # also all parameters of a module at once
    assert lookup.current()[0][1] is other.weight


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_parametrized_weight(layers, lookup):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    plain = layers["other"].weight
    parametrize.register_parametrization(layers["other"], "weight", Twice())
    assert torch.equal(lookup.current()[0][1], 2 * plain)


@pytest.mark.parametrize(
    "remove", [lambda layer: delattr(layer, "weight"), lambda layer: setattr(layer, "weight", None)]
)
def test_a_deleted_weight(layers, lookup, remove):
    remove(layers["other"])
    with pytest.raises(UnsupportedWeights, match=r"other\.weight: no tensor of that name"):
        lookup.current()

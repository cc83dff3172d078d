"""Groups of modules and of stacked particles: what is read, and which mistakes are refused."""

import pytest
import torch
from torch import nn

from repulsive import SelectionError, UnsupportedWeights, describe, group_modules, group_stacked


def mlp(width: int = 5, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2)).to(dtype)


class Stacked(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 3, 5, dtype=torch.float64))
        self.up_bias = nn.Parameter(torch.randn(experts, 5, dtype=torch.float64))
        self.last = nn.Parameter(torch.randn(3, 5, experts, dtype=torch.float64))


def test_one_group_per_weight():
    members = [mlp() for _ in range(4)]
    groups = group_modules(members, part="member")
    assert [(g.name, g.part, g.num_heads, g.dim) for g in groups] == [
        ("member.0.weight", "member", 4, 15),
        ("member.2.weight", "member", 4, 10),
    ]
    for group, index in zip(groups, (0, 2), strict=True):
        assert torch.equal(group.read(), torch.stack([member[index].weight.flatten() for member in members]))
        assert not group.is_attention and group.proof == "given"


def test_joined_modules():
    members = [mlp() for _ in range(3)]
    (group,) = group_modules(members, name="layer3", parameters="*", particle="module")
    flat = [nn.utils.parameters_to_vector(member.parameters()) for member in members]
    assert group.name == "layer3" and torch.equal(group.read(), torch.stack(flat))
    assert group.dim == flat[0].numel()


def test_parameters_by_name_and_pattern():
    members = [mlp() for _ in range(2)]
    assert [g.name for g in group_modules(members, parameters="2.*")] == ["expert.2.weight", "expert.2.bias"]
    assert [g.name for g in group_modules(members, parameters=["2.bias", "0.bias"])] == [
        "expert.0.bias",
        "expert.2.bias",
    ]


def test_adapters_in_module_lists():
    down, up = ([nn.Linear(a, b, bias=False) for _ in range(3)] for a, b in ((8, 2), (2, 8)))
    pairs = [nn.ModuleList(pair) for pair in zip(down, up, strict=True)]
    (group,) = group_modules(pairs, part="adapter", particle="module")
    assert group.num_heads == 3 and group.dim == 32
    assert torch.equal(group.read()[1], torch.cat([down[1].weight.flatten(), up[1].weight.flatten()]))


def test_compiled_modules_keep_their_names():
    members = [torch.compile(nn.Sequential(torch.compile(nn.Linear(3, 2)))) for _ in range(2)]
    (group,) = group_modules(members)
    assert group.name == "expert.0.weight" and group.num_heads == 2


def test_stacked_particles():
    layer = Stacked()
    groups = group_stacked(layer, ["up", "up_bias"])
    assert [(g.name, g.num_heads, g.dim) for g in groups] == [("expert.up", 4, 15), ("expert.up_bias", 4, 5)]
    assert torch.equal(groups[0].read(), layer.up.flatten(1))
    (joined,) = group_stacked(layer, "up*", particle="module", name="moe")
    assert joined.name == "moe"
    assert torch.equal(joined.read(), torch.cat([layer.up.flatten(1), layer.up_bias], 1))
    (last,) = group_stacked(layer, "last", axis=-1)
    assert torch.equal(last.read(), layer.last.movedim(-1, 0).flatten(1))


def test_the_table_lists_every_parameter():
    table = describe(group_modules([nn.Linear(3, 2), nn.Linear(3, 2)], part="adapter"))
    assert "adapter.0.weight + adapter.1.weight" in table and "1 group, 2 particles, 12 weights" in table


def tied() -> list[nn.Module]:
    first, second, third = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    third.weight = first.weight
    return [first, second, third]


def same_memory() -> list[nn.Module]:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.weight = nn.Parameter(first.weight.data)
    return [first, second]


ONE = nn.Linear(3, 2)
WRONG = [
    (lambda: group_modules([]), "at least two modules, got 0"),
    (lambda: group_modules([nn.Linear(3, 2)]), "at least two modules, got 1"),
    (lambda: group_modules([ONE, nn.Linear(3, 2), ONE]), "expert 0 and expert 2 are the same module"),
    (lambda: group_modules(tied(), part="member"), "member 0 and member 2 share the weights of weight"),
    (lambda: group_modules(same_memory()), "expert 0 and expert 1 share the weights"),
    (
        lambda: group_modules([mlp(5), mlp(5), mlp(6)]),
        r"expert 0 and expert 2 differ in the shape of 0.weight: \[5, 3\] and \[6, 3\]",
    ),
    (lambda: group_modules([mlp(), mlp(dtype=torch.float32)]), "differ in the type of 0.weight"),
    (lambda: group_modules([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)]), "different parameters: bias"),
    (lambda: group_modules([nn.LayerNorm(4), nn.LayerNorm(4)]), "no parameter with at least two dimensions"),
    (lambda: group_modules([mlp(), mlp()], parameters="0.wieght"), "did you mean '0.weight'"),
    (lambda: group_modules([mlp(), mlp()], parameters=[]), "parameters is empty"),
    (lambda: group_modules([mlp(), mlp()], particle="modul"), "did you mean 'module'"),
    (lambda: group_stacked(Stacked(), "down"), "match nothing in Stacked"),
    (lambda: group_stacked(Stacked(), "up", axis=3), "axis=3 does not exist"),
    (lambda: group_stacked(Stacked(1), "up"), r"at least two particles along axis 0, got shape \[1, 3, 5\]"),
    (lambda: group_stacked(Stacked(), ["up", "last"], particle="module"), "up: 4, last: 3"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=range(len(WRONG)))
def test_mistakes_are_named(make, message):
    with pytest.raises(SelectionError, match=message):
        make()


def test_weights_that_cannot_be_grouped():
    with pytest.raises(UnsupportedWeights, match="not initialised yet"):
        group_modules([nn.LazyLinear(3), nn.LazyLinear(3)])
    scalars = [nn.Module() for _ in range(2)]
    for module in scalars:
        module.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UnsupportedWeights, match=r"expert.0.gain: is a scalar"):
        group_modules(scalars, parameters="gain")


def test_tied_parameters_may_be_left_out():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.bias = first.bias
    assert [g.name for g in group_modules([first, second])] == ["expert.weight"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), r"an nn\.ModuleDict; pass its values\(\)"),
        (nn.Linear(2, 2), "one Linear"),
        ({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, "with a str in it"),
    ],
    ids=["ModuleDict", "module", "dict"],
)
def test_anything_but_a_sequence_of_modules_is_refused(modules, message):
    with pytest.raises(SelectionError, match=f"group_modules: expected a sequence of modules, got .*{message}"):
        group_modules(modules)


def test_the_values_of_a_module_dict_and_a_generator_are_accepted():
    modules = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    for given in (modules.values(), (one for one in modules.values())):
        assert [group.num_heads for group in group_modules(given)] == [2]

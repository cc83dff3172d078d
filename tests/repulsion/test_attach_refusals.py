"""Models, optimizers and selections that `repel` refuses, and that it does not change."""

import copy

import pytest
import torch
from torch import nn

from repulsive import SPOS, OptimizerError, RuleError, SelectionError, UnsupportedWeights, find_heads, repel
from repulsive.errors import NoHeadsFound
from tests.repulsion.unchanged import untouched, weights


def test_quantised_weights_are_refused_by_name(make_model):
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj = (nn.Linear(8, 8) for _ in range(3))
    model.num_heads = 2
    model.q_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedWeights, match="q_proj"):
        repel(model, torch.optim.SGD(model.k_proj.parameters(), lr=0.1), verbose=False)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"parts": "qx"}, SelectionError, "x"),
        ({"layers": "frist"}, SelectionError, "first"),
        ({"layers": [7]}, SelectionError, "7"),
        ({"groups": []}, SelectionError, "empty"),
        ({"where": "cross"}, SelectionError, "cross"),
        ({"where": "sideways"}, SelectionError, "sideways"),
        ({"particle": "atom"}, SelectionError, "atom"),
        ({"match": "*.nothing"}, SelectionError, "nothing"),
        ({"rule": "SVGD"}, RuleError, "SVGD"),
        ({"order": "clip"}, RuleError, "clip-repel"),
        ({"noise_in": "air"}, RuleError, "parameter"),
        ({"max_norm": -1.0}, RuleError, "max_norm"),
        ({"order": "repel-clip"}, RuleError, "without max_norm clips nothing"),
        ({"measure_every": 0}, RuleError, "measure_every"),
        ({"rule": SPOS(noise="released"), "noise_in": "parameter"}, RuleError, "released"),
    ],
)
def test_bad_input_changes_nothing(options, error, word, make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)
    with pytest.raises(error, match=word):
        repel(model, optimizer, **{"verbose": False, **options})
    assert untouched(optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_an_optimizer_of_another_model_is_refused(make_model):
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="none of the selected heads"):
        repel(model, optimizer, verbose=False)
    assert untouched(optimizer)


def test_a_class_is_not_a_model():
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(SelectionError, match=r"expected a model, an instance of nn\.Module, got the class Transformer"):
        repel(nn.TransformerEncoderLayer, torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(SelectionError, match=r"an instance of nn\.Module, got an object of type str"):
        repel("bert-base-uncased", torch.optim.SGD(parameters, lr=0.1))


def test_no_attention_is_an_error():
    model = nn.Linear(4, 4)
    with pytest.raises(NoHeadsFound, match=r"example_inputs=.*\n.*groups=heads_by_hand\(model"):
        repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)


def test_an_object_that_is_not_an_optimizer_is_refused(make_model):
    with pytest.raises(OptimizerError, match="not a torch optimizer"):
        repel(make_model(), object(), verbose=False)


def test_a_weight_in_two_groups_is_refused(make_model):
    model, other = make_model(), make_model(1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    groups = find_heads(model)
    with pytest.raises(SelectionError, match="share weights"):
        repel(model, optimizer, groups=[*groups, groups[0]], verbose=False)
    with pytest.raises(SelectionError, match="share weights"):
        repel(model, optimizer, groups=[*groups, *find_heads(model, particle="head")], verbose=False)
    with pytest.raises(SelectionError, match="2 groups have this name"):
        repel(model, optimizer, groups=[*groups, *find_heads(other)], verbose=False)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_copied_model_is_another_model(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptimizerError):
        repel(copy.deepcopy(model), optimizer, verbose=False)

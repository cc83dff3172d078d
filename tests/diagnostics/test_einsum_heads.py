"""Heads whose weights are bare parameters, as in TransformerLens and XLNet: ablation, capture, importance, curves."""

import copy

import pytest
import torch
from torch import nn

from repulsive import Heads, find_heads
from repulsive.diagnostics.redundancy import ablate, head_ablation, pruning_curve
from repulsive.errors import HeadLayoutError
from tests.diagnostics.einsum_models import TOKENS, WAYS, D, E, Lens, M, Stack, X, hooked, xlnet


def without(model, path, axis, heads):
    """Copy a model with the output weights of some heads set to zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter(path).movedim(axis, 0)[heads] = 0
    return model


pytestmark = pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
CASES = {
    **{way: (lambda way=way: Stack(way), X, "W_O") for way in WAYS},
    "xlnet": (xlnet, TOKENS, "o"),
    "transformer-lens": (hooked, TOKENS, "W_O"),
    "transformer-lens, result": (lambda: hooked(use_attn_result=True), TOKENS, "W_O"),
    "transformer-lens, split": (lambda: hooked(use_split_qkv_input=True), TOKENS, "W_O"),
    "transformer-lens, grouped": (
        lambda: hooked(n_key_value_heads=2, positional_embedding_type="rotary", rotary_dim=6),
        TOKENS,
        "W_O",
    ),
}


def run(model, inputs):
    result = model(inputs)
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("case", CASES)
def test_an_ablated_head_equals_a_zero_output_weight(case):
    build, inputs, name = CASES[case]
    model = build().eval()
    heads = Heads(model, inputs)
    assert set(heads.proofs().values()) == {"proved"}
    assert [layer.projection.rpartition(".")[2] for layer in heads.layers] == [name, name]
    state, whole = copy.deepcopy(model.state_dict()), run(model, inputs)
    for off in ([(0, 1)], [(1, 3)], [(0, 0), (0, 2), (1, 1)]):
        expected = model
        for row in (0, 1):
            layer = heads.layers[row]
            expected = without(expected, layer.projection, layer.axis, [head for at, head in off if at == row])
        with heads.ablated(off):
            ablated = run(model, inputs)
            assert model.state_dict().keys() == state.keys()
        torch.testing.assert_close(ablated, run(expected, inputs), rtol=1e-10, atol=1e-10)
        assert not torch.allclose(ablated, whole)
    assert torch.equal(run(model, inputs), whole)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_contributions_sum_to_the_output_of_the_layer(way):
    model = Stack(way)
    heads = Heads(model, X)
    layer = model.layers[0]
    torch.testing.assert_close(heads.outputs(X)[0].sum(2) + layer.b_O, layer(X))
    attention = heads.attention(X)[0]
    v = layer.project(X, layer.W_V, layer.b_V)
    expected = torch.einsum("bmts,bsmd,mde->btme", attention, v, layer.W_O)
    torch.testing.assert_close(heads.outputs(X)[0], expected)


def test_sequences_of_xlnet_come_first():
    model = xlnet().eval()
    heads = Heads(model, TOKENS)
    first = heads.outputs(TOKENS[:1])[0]
    assert heads.outputs(TOKENS)[0].shape == (2, 7, 4, 24)
    torch.testing.assert_close(heads.outputs(TOKENS)[0][:1], first)


def test_nested_contexts_apply_the_outer_change_first():
    model = Stack()
    heads = Heads(model, X)
    with heads.ablated([(0, 1)]):
        inside = heads.outputs(X)[0]
        with heads.ablated([(0, 2)]):
            both = model(X)
        one = model(X)
    assert not inside[:, :, 1].any() and inside[:, :, 2].any()
    torch.testing.assert_close(both, without(model, "layers.0.W_O", 0, [1, 2])(X))
    torch.testing.assert_close(one, without(model, "layers.0.W_O", 0, [1])(X))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_the_layer_ends_the_ablation(error, monkeypatch):
    model = Stack()
    heads, whole = Heads(model, X), model(X)

    def fail(_layer, *_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Lens, "project", fail)
        with pytest.raises(error), heads.ablated([(0, 1)]):
            model(X)
    assert torch.equal(model(X), whole)
    assert torch.overrides._get_current_function_mode() is None


def test_gradients_pass_through_ablated_layers():
    model = Stack().train()
    zeroed = without(model, "layers.0.W_O", 0, [1])
    with ablate(model, [("layers.0", 1)], layers=Heads(model, X).layers):
        model(X).square().mean().backward()
    zeroed(X).square().mean().backward()
    assert model.training and not model.layers[0].W_O.grad[1].any()
    for (name, own), expected in zip(model.named_parameters(), zeroed.parameters(), strict=True):
        if name != "layers.0.W_O":
            torch.testing.assert_close(own.grad, expected.grad)


@pytest.mark.parametrize("way", WAYS)
def test_importance_is_the_derivative_by_a_factor_on_the_output_weight(way):
    model, x = Stack(way), X[:1, :1]  # one token, so that a mean of absolute values is an absolute value
    scale = torch.ones(M, 1, 1, dtype=torch.float64, requires_grad=True)
    scaled = {"layers.0.W_O": model.layers[0].W_O * scale}
    torch.func.functional_call(model, scaled, (x,)).square().mean().backward()
    importance = Heads(model, X).importance([x], lambda model, batch: model(batch).square().mean())
    torch.testing.assert_close(importance[0], scale.grad.flatten().abs())


def test_mean_and_patch_replace_head_outputs():
    model = Stack()
    heads, other = Heads(model, X), X.flip(0)
    layer = model.layers[0]
    own, source = heads.outputs(X)[0], heads.outputs(other)[0]
    with heads.ablated([(0, 1)], "patch", other):
        patched = layer(X)
    torch.testing.assert_close(patched, layer(X) - own[:, :, 1] + source[:, :, 1])
    with heads.ablated([(0, 1)], "mean", other):
        mean = layer(X)
    torch.testing.assert_close(mean, layer(X) - own[:, :, 1] + source[:, :, 1].mean((0, 1)))


def test_redundancy_and_pruning_curves():
    model = Stack()
    layers = Heads(model, X).layers
    target = model(X).detach()

    def error(model):
        return (model(X) - target).square().mean()

    result = head_ablation(model, error, layers=layers)
    expected = error(without(model, "layers.1.W_O", 0, [2]))
    torch.testing.assert_close(result.change[1, 2], expected.detach())
    curve = pruning_curve(model, error, result.change, share=0.5, layers=layers)
    assert curve.removed == (0, 4, 8)
    none = copy.deepcopy(model)
    for layer in none.layers:
        nn.init.zeros_(layer.W_O)
    assert curve.metric[-1] == pytest.approx(float(error(none).detach()))


def test_a_parameter_by_hand():
    model = Lens()
    groups = find_heads(model, X)
    assert [(group.part, group.num_heads, group.head_dim) for group in groups] == [(p, M, D) for p in "qkv"]
    heads = Heads(model, X, out={"": "W_O"})
    assert (heads.layers[0].kind, heads.layers[0].head_dim) == ("parameter", D)
    with pytest.raises(HeadLayoutError, match=r"'b_O' is not a projection .* or a parameter \[heads, features"):
        Heads(model, X, out={"": "b_O"})


class Flat(Lens):
    """An output weight without an axis for heads."""

    def __init__(self):
        super().__init__()
        self.W_O = nn.Parameter(torch.randn(M * D, E, dtype=torch.float64))

    def forward(self, x):
        q, k, v = (self.project(x, weight, self.b_Q) for weight in (self.W_Q, self.W_K, self.W_V))
        weights = torch.einsum("btmd,bsmd->bmts", q, k).softmax(-1)
        return torch.einsum("bmts,bsmd->btmd", weights, v).flatten(2) @ self.W_O


def test_an_output_weight_without_an_axis_for_heads_is_refused():
    with pytest.raises(HeadLayoutError, match=r"found no output projection that takes 4 heads of size 6, one after"):
        Heads(Flat(), X)

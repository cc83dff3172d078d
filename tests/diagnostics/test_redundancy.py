"""Ablation against models with zeroed output weights; importance against finite differences."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.redundancy import ablate, all_but_one, greedy_pruning, head_ablation, heads_of, pruning_curve
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.lab.systems.classification.model import SelfAttentiveConfig, SentenceClassifier
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from tests.heads.zoo import TORCH, TRANSFORMERS, build, ids

MODELS = [*(n for n in TORCH if n != "additive"), *(n for n in TRANSFORMERS if not n.endswith("eager"))]


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@torch.no_grad()
def run(model, inputs):
    with evaluating(model):
        return first(call(model, inputs))


def with_zero_weights(model, layer, head):
    """Copy of the model whose output projection has zeros for this head."""
    other = copy.deepcopy(model)
    attention_layer = find_attention_layers(other)[layer]
    is_torch = attention_layer.kind == "torch"
    projection = attention_layer.attention.out_proj if is_torch else attention_layer.module
    d = attention_layer.head_dim
    with torch.no_grad():
        weight = projection.weight if type(projection).__name__ != "Conv1D" else projection.weight.T
        weight[:, head * d : (head + 1) * d] = 0
    return other


@pytest.mark.parametrize("name", MODELS)
def test_ablation_equals_zero_output_weights(name):
    model, inputs = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    layers = find_attention_layers(model)
    layer, head = len(layers) - 1, layers[-1].num_heads - 1
    plain = run(model, inputs)
    with ablate(model, [(layer, head)]):
        off = run(model, inputs)
    torch.testing.assert_close(off, run(with_zero_weights(model, layer, head), inputs), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(off, plain, atol=1e-4)
    assert torch.equal(run(model, inputs), plain)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_ablated_head_of_the_additive_attention_gives_zeros():
    model = SentenceClassifier(SelfAttentiveConfig.tiny(40))
    tokens = ids() % 40
    with ablate(model, [("encoder.attention", 2)]), torch.no_grad(), evaluating(model):
        _, _, sentences = model(tokens, collect=True)
    assert [bool(sentences[:, i].any()) for i in range(4)] == [True, True, False, True]


@pytest.fixture
def probe():
    """A BERT, its inputs, and a metric per item: the negative squared distance to random targets."""
    model, inputs = build("bert, sdpa")
    model = model.double()
    target = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(5)).double()
    return model, inputs, lambda m: -(m(**inputs)[0] - target).square().mean((1, 2))


def test_head_ablation_is_the_metric_of_each_zeroed_model(probe):
    model, _, evaluate = probe
    model.train()
    steps = []
    found = head_ablation(model, evaluate, progress=lambda done, of: steps.append((done, of)))
    assert model.training and steps[-1] == (8, 8)
    assert found.layers == ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
    with torch.no_grad(), evaluating(model):
        base = evaluate(model)
    assert found.baseline == pytest.approx(float(base.mean()))
    for layer in range(2):
        for head in range(4):
            other = with_zero_weights(model, layer, head)
            with torch.no_grad(), evaluating(other):
                change = evaluate(other) - base
            torch.testing.assert_close(found.items[layer, head], change)
            assert float(found.change[layer, head]) == pytest.approx(float(change.mean()))
    assert found.change.abs().min() > 1e-6


def test_all_but_one_leaves_one_head_in_its_layer(probe):
    model, _, evaluate = probe
    found = all_but_one(model, lambda m: float(evaluate(m).mean()))
    assert found.items is None
    other = model
    for head in (0, 1, 3):
        other = with_zero_weights(other, 1, head)
    with torch.no_grad(), evaluating(other):
        assert float(found.change[1, 2]) == pytest.approx(float(evaluate(other).mean()) - found.baseline)


def test_layers_with_fewer_heads_are_filled_with_nan():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.MultiheadAttention(12, heads, batch_first=True) for heads in (2, 3)])
    x = torch.randn(1, 4, 12)
    found = head_ablation(model, lambda m: m[1](*[m[0](x, x, x)[0]] * 3)[0].square().mean())
    assert found.change.isnan().tolist() == [[False, False, True], [False, False, False]]


def test_pruning_curve_removes_the_least_important_heads_first(probe):
    model, _, evaluate = probe
    scores = torch.tensor([[0.5, 0.1, 0.9, 0.3], [0.2, 0.8, 0.7, 0.4]])
    curve = pruning_curve(model, evaluate, scores, share=0.25)
    assert curve.removed == (0, 2, 4, 6, 8)
    assert curve.order == ((0, 1), (1, 0), (0, 3), (1, 3), (0, 0), (1, 2), (1, 1), (0, 2))
    other = model
    for layer, head in curve.order[:4]:
        other = with_zero_weights(other, layer, head)
    with torch.no_grad(), evaluating(other):
        assert curve.metric[2] == pytest.approx(float(evaluate(other).mean()))
    with pytest.raises(SelectionError, match="share=0"):
        pruning_curve(model, evaluate, scores, share=0)


@pytest.mark.parametrize("higher", [True, False])
def test_greedy_pruning_removes_the_cheapest_head_each_time(probe, higher):
    model, _, evaluate = probe
    curve = greedy_pruning(model, evaluate, 2, higher_is_better=higher)
    heads = heads_of(find_attention_layers(model))

    def metric(removed):
        other = model
        for layer, head in removed:
            other = with_zero_weights(other, layer, head)
        with torch.no_grad(), evaluating(other):
            return float(evaluate(other).mean())

    best = max if higher else min
    one = best(heads, key=lambda head: metric([head]))
    two = best([h for h in heads if h != one], key=lambda head: metric([one, head]))
    assert curve.order == (one, two)
    assert curve.metric == pytest.approx((metric([]), metric([one]), metric([one, two])))
    with pytest.raises(SelectionError, match="8 heads"):
        greedy_pruning(model, evaluate, 9)


def finite_differences(model, loss, batch, layers):
    """|dL / d xi| of every token and head by central differences, [L][tokens, M]."""
    found = []
    for attention_layer in layers:
        shapes = []
        with torch.no_grad(), replaced_head_outputs([attention_layer], lambda _, h, s=shapes: s.append(h.shape)):
            loss(model, batch)
        rows, columns, heads, _ = shapes[0]
        slopes = torch.zeros(rows, columns, heads, dtype=torch.float64)
        for place in [(b, t, h) for b in range(rows) for t in range(columns) for h in range(heads)]:
            values = []
            for step in (1e-4, -1e-4):

                def scaled(_, outputs, place=place, step=step):
                    factor = torch.ones(outputs.shape[:3], dtype=torch.float64)
                    factor[place] += step
                    return outputs * factor.unsqueeze(-1)

                with torch.no_grad(), replaced_head_outputs([attention_layer], scaled):
                    values.append(float(loss(model, batch)))
            slopes[place] = abs(values[0] - values[1]) / 2e-4
        found.append(slopes.flatten(0, 1))
    return found


@pytest.mark.parametrize("name", ["torch transformer", "bert, sdpa", "falcon"])  # falcon: grouped kv heads
def test_importance_is_the_derivative_of_the_loss_in_each_heads_factor(name):
    model, inputs = build(name)
    model = model.double().eval()
    if isinstance(inputs, dict):
        small = {"input_ids": inputs["input_ids"][:1, :4]}
    else:
        small = tuple(x[:1, :3].double() for x in inputs)

    def loss(m, batch):
        out = first(call(m, batch))
        return out[..., ::2].sin().sum() + out[0, -1, 3] ** 2

    slopes = finite_differences(model, loss, small, find_attention_layers(model))
    wanted = torch.stack([s.mean(0) for s in slopes])  # [L, M]
    found = first_order_importance(model, loss, [small], normalise=False)
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-5)
    unit = first_order_importance(model, loss, [small, small])
    torch.testing.assert_close(unit, wanted / wanted.square().sum(-1, keepdim=True).sqrt(), atol=1e-6, rtol=1e-5)


def test_importance_does_not_depend_on_the_amount_of_padding():
    model, _ = build("bert, sdpa")
    model.double()
    short, mask, padding = (
        ids()[:2, :5],
        torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
        torch.zeros(2, 4, dtype=torch.long),
    )
    batch = {"input_ids": short, "attention_mask": mask}
    longer = {"input_ids": torch.cat([short, padding], 1), "attention_mask": torch.cat([mask, padding], 1)}

    def loss(m, batch):
        return m(**batch)[0][:, 0].sin().sum()

    found = first_order_importance(model, loss, [batch], normalise=False)
    torch.testing.assert_close(first_order_importance(model, loss, [longer], normalise=False), found)
    alone = {"input_ids": short[1:, :3]}  # the second item without its padding
    torch.testing.assert_close(
        first_order_importance(model, loss, [{name: x[1:] for name, x in longer.items()}], normalise=False),
        first_order_importance(model, loss, [alone], normalise=False),
    )


def test_importance_leaves_gradients_alone_and_works_for_frozen_models():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(40, width=32)).double()
    batch = (ids(6) % 40, ids(5) % 40)

    def loss(m, b):
        return m(*b).logsumexp(-1).mean()

    free = first_order_importance(model, loss, [batch])
    assert all(p.grad is None for p in model.parameters()) and model.training
    for p in model.parameters():
        p.requires_grad_(False)
    torch.testing.assert_close(first_order_importance(model, loss, [batch]), free)
    assert all(not p.requires_grad for p in model.parameters())
    assert free.square().sum(-1).sqrt().tolist() == pytest.approx([1.0] * 6)


def test_a_head_without_effect_has_zero_importance(probe):
    model, inputs, _ = probe
    dead = with_zero_weights(model, 0, 2)
    found = first_order_importance(dead, lambda m, b: m(**b)[0].sin().sum(), [inputs])
    assert found[0, 2] == 0 and (found[0, [0, 1, 3]] > 0).all()


def test_numbers_of_numpy_and_torch_name_a_head(probe):
    model, _, evaluate = probe
    model.eval()
    with torch.no_grad(), ablate(model, [(1, 2)]):
        expected = evaluate(model)
    for layer, head in ((np.int64(1), np.int64(2)), (torch.tensor(1), torch.tensor(2))):
        with torch.no_grad(), ablate(model, [(layer, head)]):
            assert torch.equal(evaluate(model), expected)
        assert Heads(model)[layer, head].name == Heads(model)[1, 2].name
    layer_name = Heads(model).layers[1].name
    assert repr(Heads(model)[layer_name, torch.tensor(2)]) == f"Head 2 of layer 1 ({layer_name})"


def test_error_messages(probe):
    model, inputs, evaluate = probe
    with (
        pytest.raises(SelectionError, match=r"no layer 2; the 2 attention layers are 0 encoder\.layer\.0"),
        ablate(model, [(2, 0)]),
    ):
        pass
    not_numbers = (1.0, None, True, np.float64(1), np.True_, np.array([0, 1]))
    not_numbers += (torch.tensor(1.0), torch.tensor(True), torch.tensor([0, 1]))
    for layer in (-1, "encoder", *not_numbers):
        with (
            pytest.raises(SelectionError, match=re.escape(f"no layer {layer!r}; the 2 attention layers")),
            ablate(model, [(layer, 0)]),
        ):
            pass
    for head in (4, -1, "1", torch.tensor(-1), *not_numbers):
        with (
            pytest.raises(SelectionError, match=re.escape(f"no head {head!r}; its heads are 0 to 3")),
            ablate(model, [(0, head)]),
        ):
            pass
    with pytest.raises(HeadLayoutError, match="no head output was recorded"):
        head_ablation(model, lambda m: 1.0)
    heads = Heads(model)
    for ablated in (lambda: ablate(model, [(0, 0)]), lambda: heads.ablated([(0, 0)]), heads[0, 0].ablated):
        with pytest.warns(UserWarning, match="did not run encoder") as caught, ablated():
            pass
        assert caught[0].filename == __file__
    with pytest.raises(SelectionError, match="no batches"):
        first_order_importance(model, lambda m, b: m(**b)[0].sum(), [])
    with pytest.raises(SelectionError, match="one element"):
        first_order_importance(model, lambda m, b: m(**b)[0], [inputs])
    with pytest.raises(RuntimeError, match="stop"), ablate(model, [(0, 0)]):
        raise RuntimeError("stop")
    with torch.no_grad(), evaluating(model):
        assert math.isfinite(float(evaluate(model).mean()))
    assert not any(m._forward_pre_hooks for m in model.modules())

"""Output projections with any name are found by autograd, and only if they are one."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from repulsive import HeadMonitor, Heads, find_heads
from repulsive.diagnostics.hooks.traced_projections import traced_projections
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.errors import HeadLayoutError, NoHeadsFound, SelectionError

M, KV, D = 4, 2, 6


class Own(nn.Module):
    """Attention with names of its own: 4 query heads, 2 key-value heads, a gate as wide as the heads, a mixing step."""

    def __init__(self, mixed=False):
        super().__init__()
        self.mixed = mixed
        self.queries, self.keys, self.vals = nn.Linear(24, M * D), nn.Linear(24, KV * D), nn.Linear(24, KV * D)
        self.gate, self.mix = nn.Linear(24, M * D), nn.Linear(M * D, 24)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.queries, self.keys, self.vals)
        )  # [B, M, T, d]
        k, v = (each.repeat_interleave(M // KV, dim=1) for each in (k, v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [B, T, M d]
        heads = heads * self.gate(x).sigmoid()
        return self.mix(heads.cumsum(-1) if self.mixed else heads)


class Blocks(nn.Module):
    def __init__(self, mixed=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Own(mixed), Own(mixed)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


def test_any_name_is_found_and_the_model_stays_as_it_is():
    model = Blocks().train()
    model.layers[0].vals.requires_grad_(False)
    heads = Heads(model, X)
    assert [layer.projection for layer in heads.layers] == ["layers.0.mix", "layers.1.mix"]
    assert model.training and not model.layers[0].vals.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    bias = model.layers[0].mix.bias
    torch.testing.assert_close(heads.outputs(X)[0].sum(2) + bias, model.layers[0](X))
    assert len(heads.similarity([X], "ov", twins=0)) == 2
    with heads.ablated([(0, 1)]):
        ablated = model(X)
    assert not torch.allclose(ablated, model(X))


def test_a_projection_that_mixes_heads_first_is_refused_with_the_remedy():
    with pytest.raises(
        HeadLayoutError, match=r'found no output .* in a trace; if there is one, name it: out=\{"layers\.0": "dotted'
    ):
        Heads(Blocks(mixed=True), X)
    named = {f"layers.{i}": f"layers.{i}.mix" for i in range(2)}
    assert Heads(Blocks(mixed=True), X, out=named).layers[0].projection == "layers.0.mix"


def test_attention_that_is_the_model_itself_is_named_by_the_empty_string():
    with pytest.raises(HeadLayoutError, match=r'Own: found no output .*name it: out=\{"": "dotted'):
        Heads(Own(mixed=True), X)
    assert Heads(Own(mixed=True), X, out={"": "mix"}).layers[0].projection == "mix"


def test_a_name_that_is_not_an_attention_layer_is_an_error():
    with pytest.raises(SelectionError, match=r"no attention layer 'layer.0'; did you mean 'layers.0'"):
        Heads(Blocks(), X, out={"layer.0": "layers.0.mix"})


def test_usual_names_need_no_forward_pass():
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert traced_projections(model, find_heads(model), "never used") == {}


def test_an_inspection_measures_outputs_of_an_own_class():
    result = inspect_heads(Blocks(), [X], twins=0)
    assert [name for name, *_ in result.layers] == ["layers.0", "layers.1"]
    assert result.importance is not None and len(result.circuits.ov) == 2


def test_a_monitor_measures_an_own_class():
    model = Blocks()
    with pytest.raises(NoHeadsFound, match="example_inputs="):
        HeadMonitor(model)
    with HeadMonitor(model, every=1, example_inputs=X) as monitor:
        model(X).sum().backward()
        monitor.step()
        assert [layer.label for layer in monitor.history[0].layers] == ["layer 0", "layer 1"]
    with HeadMonitor(model, probe=X) as monitor:
        assert len(monitor.measure().layers) == 2


class Usual(nn.Module):
    """Names as in timm: `proj` should be the output projection, and takes the heads one after the other."""

    def __init__(self, wanted="proj", values=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.wanted = M, wanted
        self.q, self.k, self.v = nn.Linear(24, M * D), nn.Linear(24, M * D), values(24, M * D)
        self.proj, self.last = nn.Linear(24, 24), nn.Linear(M * D, 24)
        self.norm = nn.LayerNorm(M * D)

    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        x = self.proj(x) if self.wanted == "last" else x
        q, k, v = (layer(x).unflatten(-1, (M, D)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = self.attend(q, k, v).transpose(1, 2)  # [B, T, M, d]
        heads = (heads.mT if self.wanted == "none" else heads).flatten(2)
        return getattr(self, "last" if self.wanted == "last" else "proj")(
            self.norm(heads) if self.wanted == "norm" else heads
        )


@pytest.mark.parametrize("wanted", ["proj", "norm", "last"])
def test_a_usual_name_is_tested(wanted):
    model = nn.Sequential(Usual(wanted))
    projection = "last" if wanted == "last" else "proj"
    heads = Heads(model, X)
    assert heads.layers[0].projection == f"0.{projection}"
    with heads.ablated([(0, 1)]):
        ablated = model(X)
    with torch.no_grad():
        getattr(model[0], projection).weight[:, D : 2 * D] = 0
    torch.testing.assert_close(ablated, model(X))


def test_a_usual_name_that_takes_the_features_of_all_heads_in_turns_is_refused():
    model = nn.Sequential(Usual("none"))
    with pytest.raises(HeadLayoutError, match=r"found no output projection .* one after the other .* in a trace; if"):
        Heads(model, X)
    notes = inspect_heads(model, [X], twins=0).notes
    assert any("found no output projection" in note for note in notes)


def test_a_layer_that_runs_twice_keeps_its_usual_name():
    shared = Usual()
    model = nn.Sequential(shared, shared)
    assert [layer.projection for layer in Heads(model, X).layers] == ["0.proj"]


class FlexAttention(Usual):
    def attend(self, q, k, v):
        return flex_attention(q, k, v)


class Convolution(nn.Conv1d):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 1)

    def forward(self, x):
        return super().forward(x.mT).mT


def test_flex_attention_is_traced_on_a_cpu():
    assert Heads(nn.Sequential(FlexAttention()), X).layers[0].projection == "0.proj"


def test_values_of_a_convolution_are_traced():
    model = nn.Sequential(Usual(values=Convolution))
    del model[0].num_heads
    assert Heads(model, X).layers[0].projection == "0.proj"

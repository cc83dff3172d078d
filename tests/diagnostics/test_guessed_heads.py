"""Measurements prove guessed heads on their inputs: names and shapes alone may show the wrong rows."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from repulsive import HeadMonitor, Heads
from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.untrained_baseline import against_chance

M, D = 4, 8
X = torch.randn(4, 6, M * D, generator=torch.Generator().manual_seed(0))


class Interleaved(nn.Module):
    """Names as in timm, where q, k and v follow each other; here each head has its own q, k and v instead."""

    def __init__(self, out="proj"):
        super().__init__()
        self.num_heads, self.out_name = M, out
        self.qkv = nn.Linear(M * D, 3 * M * D)
        self.add_module(out, nn.Linear(M * D, M * D))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (M, 3, D)).transpose(1, 2).unbind(3)  # [B, M, T, d]
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [B, T, M d]
        return self.get_submodule(self.out_name)(heads)


class ReadsTokens(nn.Module):
    """A model with `input_ids` and an attention class that has no attribute for the number of heads."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(40, M * D), Interleaved()
        del self.attention.num_heads

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Interleaved())


def true_cosines(model):
    """Cosines between the logits of heads, over all pairs of tokens, keys centred per sequence, in float64."""
    features = model[0].double().qkv(X.double()).unflatten(-1, (M, 3, D))  # [B, T, M, 3, d]
    q, k = features[..., 0, :], features[..., 1, :]
    k = k - k.mean(1, keepdim=True)
    logits = torch.einsum("bthd,cshd->hbtcs", q, k).flatten(1)
    model.float()
    return F.normalize(logits, dim=1) @ F.normalize(logits, dim=1).T


def test_logits_are_those_of_the_true_heads(model):
    expected = true_cosines(model)
    torch.testing.assert_close(circuit_similarity(model, [X]).logits[0].cosine, expected, atol=1e-4, rtol=0)
    measured = against_chance(model, [X], twins=1).logits[0].similarity.cosine
    torch.testing.assert_close(measured, expected, atol=1e-4, rtol=0)
    inspection = inspect_heads(model, [X], twins=0)
    assert {group.proof for group in inspection.groups} == {"proved"}
    torch.testing.assert_close(inspection.circuits.logits[0].similarity.cosine, expected, atol=1e-4, rtol=0)


def test_a_monitor_proves_heads_on_its_probe(model):
    with HeadMonitor(model, probe=X) as monitor:
        measured = monitor.measure().layers[0].cosine
    torch.testing.assert_close(torch.tensor(measured), true_cosines(model), atol=1e-4, rtol=0, check_dtype=False)


@pytest.mark.parametrize("measure", [HeadMonitor, Heads])
def test_a_guess_without_inputs_is_a_warning(measure, model):
    with pytest.warns(UserWarning, match=r"heads of 0\.q and 2 more are a guess .*; pass example_inputs="):
        measure(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(model, example_inputs=X)
        measure(nn.MultiheadAttention(8, 2))


def test_an_inspection_without_inputs_says_that_heads_are_a_guess(model):
    (note,) = inspect_heads(model, []).notes
    assert "0.q and 2 more are a guess" in note
    assert inspect_heads(nn.MultiheadAttention(8, 2), []).notes == ()


def test_captures_and_ablations_find_classes_without_usual_names():
    torch.manual_seed(0)
    model = nn.Sequential(Interleaved("mix"))
    assert capture(model, X).layers[0].layer.projection == "0.mix"
    assert ablate_output(model, [X]).items.shape == (M, len(X))


def test_kinds_of_heads_are_those_of_an_unknown_class():
    torch.manual_seed(0)
    model = ReadsTokens()
    batch = {"input_ids": torch.randint(40, (4, 6))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inspection = inspect_heads(model, [batch], twins=1)
    assert inspection.kinds is not None and inspection.kinds.scores["previous token"].shape == (1, M)
    assert not any("labelled" in note for note in inspection.notes)

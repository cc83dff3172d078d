"""Kinds of heads: masks by hand, heads that are built to be of a kind, and none in untrained models."""

import pytest
import torch
from torch import nn

from repulsive.diagnostics.head_kinds import HeadKinds, head_kinds, pattern_masks
from repulsive.diagnostics.model_heads import Heads
from repulsive.errors import SelectionError

transformers = pytest.importorskip("transformers")


def test_masks_by_hand():
    masks = pattern_masks(torch.tensor([[7, 8, 3, 7, 8, 3]]), separators=[3])
    pairs = {kind: [tuple(pair) for pair in mask[0].nonzero().tolist()] for kind, mask in masks.items()}
    assert pairs["first token"] == [(2, 0), (3, 0), (4, 0), (5, 0)]
    assert pairs["previous token"] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert pairs["next token"] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert pairs["same token"] == [(0, 3), (1, 4), (2, 5), (3, 0), (4, 1), (5, 2)]
    assert pairs["induction"] == [(3, 1), (4, 2), (5, 3)]
    assert pairs["separator"] == [(q, s) for q in (0, 1, 3, 4) for s in (2, 5)]
    assert "separator" not in pattern_masks(torch.tensor([[7, 8]]))


class Patterned(nn.Module):
    """One layer of four heads whose scores are set by hand: first, previous, next and same token."""

    def __init__(self, width=64, tokens=32):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.attention = Scored(width)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids), input_ids)


class Scored(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, ids):
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        masks = pattern_masks(ids)
        wanted = [masks[kind] for kind in ("first token", "previous token", "next token", "same token")]
        scores = 1e-3 * q @ k.mT + 30.0 * torch.stack(wanted, 1)  # [B, 4, T, T]
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_heads_built_to_be_of_a_kind_get_its_label():
    torch.manual_seed(0)
    model = Patterned()
    heads = Heads(model, {"input_ids": torch.randint(32, (2, 6))})
    kinds = head_kinds(heads, length=12, twins=0)
    assert kinds.labels() == {
        (0, 0): "first token",
        (0, 1): "previous token",
        (0, 2): "next token",
        (0, 3): "same token",
    }
    assert kinds.scores["previous token"][0, 1] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("family", ["GPT2", "Bert"])
def test_untrained_models_have_no_kinds(family):
    torch.manual_seed(5)
    sizes = {"GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "Bert": {}}[family]
    sizes |= {"vocab_size": 50} | (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        if family == "Bert"
        else {}
    )
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    kinds = head_kinds(model, length=10, batch=4, twins=2)
    assert isinstance(kinds, HeadKinds) and kinds.labels() == {}
    assert all(threshold >= 0.3 for threshold in kinds.thresholds.values())


def test_thresholds_are_what_untrained_heads_reach():
    """A sequence of two tokens: an untrained head gives its previous token half of its attention."""
    torch.manual_seed(0)
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4)).eval()
    kinds = head_kinds(model, length=2, batch=4, twins=1)
    assert kinds.thresholds["previous token"] > 0.3


def test_a_vocabulary_that_is_unknown_or_too_small_is_named():
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=8, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(SelectionError, match="8 tokens to draw from"):
        head_kinds(model)
    with pytest.raises(SelectionError, match="give vocabulary="):
        head_kinds(Heads(nn.MultiheadAttention(8, 2, batch_first=True)))

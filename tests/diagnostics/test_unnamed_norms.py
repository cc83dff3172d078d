"""Norms on queries, keys and values of unknown classes: measured if their name shows them, else refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from repulsive import SVGD, find_heads, repel
from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.errors import HeadLayoutError, RuleError
from tests.heads.zoo import TimmAttention

M, D = 4, 8
X = torch.randn(3, 6, M * D, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention whose `change` is applied to the heads of one part (q, k or v), [B, M, T, d]."""

    def __init__(self, part="", change=None, name=""):
        super().__init__()
        self.mix, self.merge = nn.Linear(M * D, 3 * M * D), nn.Linear(M * D, M * D)
        self.part, self.change = part, [change]  # a list, which does not name a module
        if name:
            self.add_module(name, change)

    def forward(self, x):
        parts = dict(zip("qkv", self.mix(x).unflatten(-1, (3, M, D)).permute(2, 0, 3, 1, 4), strict=True))
        if self.part:
            parts[self.part] = self.change[0](parts[self.part])
        return self.merge(F.scaled_dot_product_attention(*parts.values()).transpose(1, 2).flatten(2))


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


UNNAMED = {
    "normalize": lambda: (lambda x: F.normalize(x, dim=-1), ""),
    "by hand": lambda: (rms, ""),
    "divided by its norm": lambda: (lambda x: x / x.norm(dim=-1, keepdim=True), ""),
    "a module of another name": lambda: (nn.LayerNorm(D), "smooth"),
}


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("kind", UNNAMED)
def test_unnamed_norms_are_refused(kind, part):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(part, *UNNAMED[kind]()))
    words = {"q": "queries", "k": "keys", "v": "values"}[part]
    with pytest.raises(HeadLayoutError, match=f"Attention normalises {words} outside a submodule named {part}_norm"):
        circuit_similarity(model, [X])


def test_training_between_logits_refuses_them():
    torch.manual_seed(0)
    model = nn.Sequential(Attention("q", *UNNAMED["normalize"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuleError, match="normalises queries outside a submodule named q_norm"):
        repel(model, optimizer, SVGD("heads", space="logits"), example_inputs=X, verbose=False)
    repel(model, optimizer, SVGD("heads"), example_inputs=X, verbose=False)  # weights do not depend on the norm


def test_a_named_norm_is_measured():
    torch.manual_seed(0)
    norm = nn.LayerNorm(D)
    model = nn.Sequential(Attention("q", norm, "q_norm")).double()
    groups = {group.part: group for group in find_heads(model, X.double())}
    assert groups["q"].has_norm
    assert not groups["v"].has_norm
    (layer,) = circuit_similarity(model, [X.double()]).logits
    q, k, _ = model[0].mix(X.double()).unflatten(-1, (3, M, D)).unbind(-3)  # [B, T, M, d]
    q, k = norm(q).flatten(0, 1), (k - k.mean(1, keepdim=True)).flatten(0, 1)
    logits = torch.einsum("xmd,ymd->mxy", q, k).flatten(1)  # [M, N N]
    unit = F.normalize(logits, dim=-1)
    torch.testing.assert_close(layer.cosine, unit @ unit.T, rtol=1e-9, atol=1e-9)


def test_a_named_norm_on_queries_alone_is_measured():
    torch.manual_seed(0)
    model = nn.Sequential(TimmAttention())  # softmax over scores, where the trace cannot tell a norm on q from one on k
    assert isinstance(model[0].k_norm, nn.Identity)
    assert len(circuit_similarity(model, [torch.randn(2, 5, 24)]).logits) == 1


def test_attention_without_a_norm_is_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(M * D), Attention(), nn.LayerNorm(M * D))
    assert not any(group.has_norm for group in find_heads(model, X))
    assert len(circuit_similarity(model, [X]).logits) == 1

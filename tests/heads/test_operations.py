"""Heads of attention with uncommon operations: functions other than softmax, token sampling, nested tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import NoHeadsFound
from repulsive.heads import find_heads, verify_heads
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.table.parse_layout import rows_of
from repulsive.heads.trace.infer import Completed, complete

H, D, E = 4, 3, 12
TRUTH = {part: rows.tolist() for part, rows in rows_of("head qkv dim", 3 * H * D, H).items()}


class Interleaved(nn.Module):
    """One projection with q, k and v of head 0, then of head 1, ...; `attend` is [B, H, T, D] x 3 -> [B, H, T, D]."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.merge, self.attend = nn.Linear(E, 3 * H * D), nn.Linear(H * D, E), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (H, 3, D)).permute(3, 0, 2, 1, 4)
        return self.merge(self.attend(q, k, v).transpose(1, 2).flatten(2))


def _x(tokens: int = 6) -> Tensor:
    return torch.randn(2, tokens, E, generator=torch.Generator().manual_seed(0))


def _rows(model: nn.Module, example: Any) -> dict[str, list[list[int]]]:
    groups = find_heads(model, example)
    assert {g.proof for g in groups} == {"proved"}
    assert {r.status for r in verify_heads(model, example, groups)} == {"verified"}
    return {g.part: g.slices[0].rows.tolist() for g in groups}


def _completed(model: nn.Module, example: Any) -> Completed:
    return complete(model, example, heads_from_table(model)[0])


def _sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * D**-0.5).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e9)
    return F.dropout(scores.sigmoid(), 0.0) @ v


def _squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bhsd->bhtd", torch.einsum("bhtd,bhsd->bhts", q, k).relu().square(), v)


def _gumbel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.gumbel_softmax(q @ k.mT, tau=0.5, hard=True, dim=-1) @ v


def _saturated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (6e3 * (q @ k.mT)).softmax(-1) @ v


def _sampled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keep the queries at which the first token looks most, weighted by the size of their values in all heads."""
    weights = (q @ k.mT).softmax(-1)
    importance = torch.einsum("bhn,bhn->bn", weights[:, :, 0], v.norm(dim=-1))
    chosen = importance.topk(3).indices[:, None, :, None].expand(-1, H, -1, weights.shape[-1])
    return weights.gather(2, chosen) @ v


@pytest.mark.parametrize("attend", [_sigmoid, _squared_relu, _gumbel, _saturated, _sampled])
def test_rows_are_the_true_rows(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert _rows(Interleaved(attend), _x()) == TRUTH


def test_a_product_with_the_weights_of_all_heads_that_is_used_is_mixing() -> None:
    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        importance = torch.einsum("bhn,bhn->bn", weights[:, :, 0], v.norm(dim=-1))
        return weights @ v * importance[:, None, :, None]

    torch.manual_seed(0)
    with pytest.raises(NoHeadsFound, match=r"talking heads|of another head|uses rows"):
        find_heads(Interleaved(pooled), _x())


def test_heads_mixed_without_a_softmax_are_not_proved() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores + 0.1 * scores.roll(1, 1)).sigmoid() @ v

    torch.manual_seed(0)
    completed = _completed(Interleaved(mixed), _x())
    assert not {g.part for g in completed.groups if g.proof == "proved"} & {"q", "k"}


def test_tokens_that_start_at_zero_do_not_hide_keys() -> None:
    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv = H, nn.Linear(E, 3 * H * D, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([x.new_zeros(len(x), 3, E), x], 1)
            q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    assert {r.status for r in verify_heads(Registers(), _x())} == {"verified"}


def test_a_square_projection_by_convolution_is_not_a_matrix_that_mixes_heads() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, width = H, H * D
            self.to_q, self.to_k, self.to_v = (nn.Conv2d(width, width, 1, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(1, (H, D)).flatten(3).mT for f in (self.to_q, self.to_k, self.to_v))
            return (q @ k.mT).softmax(-1) @ v

    torch.manual_seed(0)
    assert {r.status for r in verify_heads(Image(), torch.randn(2, H * D, 3, 4))} == {"verified"}


def test_nested_tensors() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = (nn.Linear(E, H * D, bias=False) for _ in range(3))
            self.merge = nn.Linear(H * D, E)

        def forward(self, samples: list[Tensor]) -> Tensor:
            x = torch.nested.nested_tensor(samples, layout=torch.jagged)
            q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            return torch.stack([y.mean(0) for y in self.merge(out).unbind()])

    torch.manual_seed(0)
    rows = torch.arange(H * D).view(H, D).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype in torch
        assert _rows(Ragged(), ([torch.randn(3, E), torch.randn(5, E)],)) == dict.fromkeys("qkv", rows)


def _channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((F.normalize(q, dim=2).mT @ F.normalize(k, dim=2)).softmax(-1) @ v.mT).mT


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.relu() @ (k.relu().mT @ v)


def _gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q + k).softmax(-1) * v


@pytest.mark.parametrize(("attend", "has_attention"), [(_channels, False), (_gated, False), (_linear, True)])
def test_no_heads_without_weights_from_queries_and_keys_at_tokens(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], has_attention: bool
) -> None:
    torch.manual_seed(0)
    model = Interleaved(attend)
    completed = _completed(model, _x())
    assert not completed.groups
    assert completed.has_attention == has_attention  # a product of keys and values may be linear attention
    with pytest.raises(NoHeadsFound):
        find_heads(model, _x())


def test_channel_attention_in_a_class_with_a_known_signature_is_left_out() -> None:
    class Covariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv = H, nn.Linear(E, 3 * H * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            return _channels(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="over channels, not tokens"), pytest.raises(NoHeadsFound):
        find_heads(Covariance(), _x())


def test_ordinary_attention_is_attention() -> None:
    torch.manual_seed(0)
    model = Interleaved(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    assert _completed(model, _x()).has_attention
    assert _rows(model, _x()) == TRUTH


def test_attention_by_parametrised_weights_is_attention() -> None:
    torch.manual_seed(0)
    model = Interleaved(F.scaled_dot_product_attention)
    nn.utils.parametrizations.weight_norm(model.mix)
    completed = _completed(model, _x())
    assert not completed.groups and completed.has_attention

"""Attention classes that the family table does not list; `truth` has the rows of each head of each part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

H, D, E = 4, 3, 10  # heads, features per head, input width


class Mix(nn.Module):
    """One projection `mix` for q, k and v; `unpack` of a subclass turns its features into q, k, v [B, H, T, D]."""

    truth: ClassVar[dict[str, list[list[int]]]]

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(E, 3 * H * D)
        self.merge = nn.Linear(H * D, E)

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(*self.unpack(self.mix(x)))
        return x + self.merge(out.transpose(1, 2).flatten(2))


def _table(index: Tensor) -> dict[str, list[list[int]]]:
    """[part, head, dim] row numbers as a dictionary of lists."""
    return dict(zip("qkv", index.sort(-1).values.tolist(), strict=True))


_ALL = torch.arange(3 * H * D)


class Packed(Mix):
    """Rows: all of q, then k, then v, head after head."""

    truth: ClassVar = _table(_ALL.view(3, H, D))

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)


class Interleaved(Mix):
    """Rows: q, k and v of head 0, then of head 1, ..."""

    truth: ClassVar = _table(_ALL.view(H, 3, D).transpose(0, 1))

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.unflatten(-1, (H, 3, D)).permute(3, 0, 2, 1, 4).unbind(0)


class HeadFastest(Mix):
    """Rows: blocks of q, k and v; within a block row c belongs to head c mod H, so strided slices are right."""

    truth: ClassVar = _table(_ALL.view(3, D, H).transpose(1, 2))

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.unflatten(-1, (3, D, H)).permute(2, 0, 4, 1, 3).unbind(0)


class Eager(Interleaved):
    """As Interleaved, with softmax computed explicitly and a mask, a cast and dropout around it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / D**0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
        return torch.matmul(F.dropout(weights, 0.1, self.training), v)


class Merged(Packed):
    """As Packed, with samples and heads merged into one axis, [B * H, T, D]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, tokens, _ = q.shape
        q, k, v = (x.reshape(batch * H, tokens, D) for x in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(batch, H, tokens, D)


class Einsum(Interleaved):
    """As Interleaved, with heads in the third axis of the scores, [B, T, H, S]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bhtd,bhsd->bths", q, k).softmax(dim=-1)
        return torch.einsum("bths,bhsd->bhtd", weights, v)


class InPlace(Packed):
    """As Packed, with an in-place write into the projection, which autograd forbids on a leaf."""

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x *= 0.5
        return super().unpack(x)


class Grouped(nn.Module):
    """Separate projections of 6 q heads and 2 kv heads; q head h uses kv head h mod 2."""

    truth: ClassVar = {
        "q": torch.arange(18).view(6, 3).tolist(),
        "k": torch.arange(6).view(2, 3).tolist(),
        "v": torch.arange(6).view(2, 3).tolist(),
    }

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value = nn.Linear(E, 18), nn.Linear(E, 6), nn.Linear(E, 6)
        self.merge = nn.Linear(18, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_query(x).unflatten(-1, (6, 3)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (2, 3)).transpose(1, 2).repeat(1, 3, 1, 1) for layer in (self.to_key, self.to_value)
        )
        out = (q @ k.mT).softmax(-1) @ v
        return self.merge(out.transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys of three rows per head and two rows that all heads share, as in latent attention."""

    truth: ClassVar = {
        "q": torch.arange(20).view(4, 5).tolist(),
        "k": torch.arange(12).view(4, 3).tolist(),
        "v": torch.arange(12).view(4, 3).tolist(),
    }

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value, self.merge = (
            nn.Linear(E, 20),
            nn.Linear(E, 12 + 2),
            nn.Linear(E, 12),
            nn.Linear(12, E),
        )

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_query(x).unflatten(-1, (4, 5)).transpose(1, 2)
        own, common = self.to_key(x).split((12, 2), -1)
        k, v = (part.unflatten(-1, (4, 3)).transpose(1, 2) for part in (own, self.to_value(x)))
        k = torch.cat([k, common.unsqueeze(1).expand(-1, 4, -1, -1)], -1)
        return self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Pooling(nn.Module):
    """Additive attention with scores [B, M, T]; a head is one row of the parameter `w2`."""

    truth: ClassVar = {"v": [[0], [1], [2], [3], [4]]}

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.LSTM(E, 6, batch_first=True, bidirectional=True)
        self.w1 = nn.Parameter(torch.randn(7, 12))
        self.w2 = nn.Parameter(torch.randn(5, 7))
        self.classify = nn.Linear(60, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.encode(x)  # [B, T, 12]
        weights = (self.w2 @ torch.tanh(self.w1 @ hidden.mT)).softmax(-1)  # [B, M, T]
        return self.classify((weights @ hidden).flatten(1))


class PerHead(nn.Module):
    """Weights [input, head, feature] for einsum, so heads are counted along axis 1; the first queries are masked."""

    truth: ClassVar = {part: [[0], [1], [2], [3]] for part in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value = (nn.Parameter(torch.randn(E, H, D)) for _ in range(3))
        self.merge = nn.Parameter(torch.randn(H, D, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bte,ehd->bthd", x, weight) for weight in (self.to_query, self.to_key, self.to_value))
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        scores = torch.cat([scores[:, :, :3].masked_fill(torch.tensor(True), -1e9), scores[:, :, 3:]], 2)
        out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        return torch.einsum("bthd,hde->bte", out, self.merge)


class Copied(PerHead):
    """Weights [head, input, feature] that are used as reshaped copies, as in TransformerLens."""

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value = (nn.Parameter(torch.randn(H, E, D)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = (weight.permute(0, 2, 1).reshape(H * D, E) for weight in (self.to_query, self.to_key, self.to_value))
        q, k, v = (nn.functional.linear(x, weight).unflatten(-1, (H, D)) for weight in weights)  # [B, T, M, d]
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        return torch.einsum("bhts,bshd,hde->bte", scores.softmax(-1), v, self.merge)


class OwnInputs(Copied):
    """Each head projects its own input."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.unsqueeze(2).expand(-1, -1, H, -1)  # [B, T, M, E]
        weights = self.to_query, self.to_key, self.to_value
        q, k, v = (torch.einsum("bthe,hed->bthd", inputs, weight) for weight in weights)
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        return torch.einsum("hde,bhts,bshd->bte", self.merge, scores.softmax(-1), v)


UNKNOWN: tuple[type[nn.Module], ...] = (
    Packed,
    Interleaved,
    HeadFastest,
    Eager,
    Merged,
    Einsum,
    InPlace,
    Grouped,
    Latent,
    Pooling,
    PerHead,
    Copied,
    OwnInputs,
)

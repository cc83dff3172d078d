"""Attention that is hard to trace or guess: misleading names, unusual packing and pairing, hidden or mixed heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

H, D, E = 4, 3, 12  # heads, features per head, width


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend and concatenate the heads: q, k, v [B, H, T, D] -> [B, T, H * D]."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OwnCheckpoint(torch.autograd.Function):
    """A hand-written checkpoint, as in diffusion code: forward without gradients, recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, count: int, *args: Tensor) -> Tensor:  # type: ignore[override]
        ctx.run, ctx.inputs, ctx.weights = run, list(args[:count]), list(args[count:])
        with torch.no_grad():
            out: Tensor = run(*ctx.inputs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        return None, None, *torch.autograd.grad(out, [*inputs, *ctx.weights], grads, allow_unused=True)


class UNetAttention(nn.Module):
    """Rows head by head (q, k, v of head 0, then of head 1, ...) though `qkv` suggests q, k, v blocks; checkpointed.

    Args:
        hide: "own" for the hand-written checkpoint, "reentrant" or "not reentrant" for torch's.
    """

    def __init__(self, hide: str = "own") -> None:
        super().__init__()
        self.num_heads, self.hide = H, hide
        self.qkv, self.proj_out = nn.Conv1d(E, 3 * H * D, 1), nn.Conv1d(H * D, E, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        if self.hide == "own":
            out: Tensor = OwnCheckpoint.apply(self._attend, 1, x, *self.parameters())  # type: ignore[no-untyped-call]
        else:
            out = checkpoint(self._attend, x.requires_grad_(), use_reentrant=self.hide == "reentrant")
        return out.mT

    def _attend(self, x: Tensor) -> Tensor:
        batch, _, tokens = x.shape
        q, k, v = self.qkv(x).reshape(batch * H, 3 * D, tokens).split(D, dim=1)  # [B * H, D, T]
        weights = torch.einsum("bct,bcs->bts", q, k).softmax(-1)
        return self.proj_out(torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, tokens))


class WrittenOut(torch.autograd.Function):
    """Attention without a call to softmax."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(q, k, v)
        weights = (q @ k.mT).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(*inputs, scale=1.0)
        return torch.autograd.grad(out, inputs, grads)


class Opaque(WrittenOut):
    """Attention without torch operations, as in a Triton kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(q, k, v)
        queries, keys, values = (x.detach().numpy() for x in (q, k, v))
        weights = np.exp(queries @ keys.swapaxes(-1, -2))
        return torch.from_numpy(weights / weights.sum(-1, keepdims=True) @ values)


class KernelAttention(nn.Module):
    """Rows head by head in `to_qkv`; the attention is an autograd function."""

    def __init__(self, function: type[WrittenOut] = Opaque) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.function = H, nn.Linear(E, 3 * H * D), function

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (H, 3, D)).permute(3, 0, 2, 1, 4)
        return self.function.apply(q, k, v).transpose(1, 2).flatten(2)  # type: ignore[no-untyped-call,no-any-return]


class MosaicAttention(nn.Module):
    """`Wqkv` with rows of 4 q heads, then 2 k heads, then 2 v heads; their number is called `kv_n_heads`."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.kv_n_heads = H, 2
        self.Wqkv = nn.Linear(E, (H + 2 * 2) * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).split((H * D, 2 * D, 2 * D), -1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        return attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


class FeatureFirst(nn.Module):
    """Blocks of q, k and v; within a block feature c belongs to head c mod H (einops: `b t (d h)`)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.to_qkv = H, nn.Linear(E, 3 * H * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (D, H)).permute(0, 3, 1, 2) for y in self.to_qkv(x).chunk(3, -1))
        return attended(q, k, v)


class Tiled(nn.Module):
    """Two kv heads, tiled: kv head 0 serves q heads 0 and 2, not neighbours. `eager` computes softmax explicitly."""

    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.eager = H, 2, eager
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, n * D, bias=False) for n in (H, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) if self.eager else attended(q, k, v)


class JointAttention(nn.Module):
    """Joint attention as in SD3 and Flux: image and text have separate projections and attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = H
        self.to_q, self.to_k, self.to_v = (nn.Linear(E, H * D) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(E, H * D) for _ in range(3))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        own = (self.to_q, self.to_k, self.to_v)
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        both = (torch.cat([f(image), g(text)], 1) for f, g in zip(own, added, strict=True))
        return attended(*(x.unflatten(-1, (H, D)).transpose(1, 2) for x in both))


class InProjection(nn.Module):
    """`in_proj_weight` packed as in nn.MultiheadAttention, in another class, as in open_clip."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.in_proj_weight = H, nn.Parameter(torch.randn(3 * H * D, E))
        self.out_proj = nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.in_proj_weight).chunk(3, -1)
        return self.out_proj(attended(*(y.unflatten(-1, (H, D)).transpose(1, 2) for y in (q, k, v))))


class NanochatAttention(nn.Module):
    """Separate `c_q`, `c_k`, `c_v` with 4 q heads and 2 kv heads, as in nanochat."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = H, 2
        self.c_q, self.c_k, self.c_v = (nn.Linear(E, n * D, bias=False) for n in (H, 2, 2))
        self.c_proj = nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.c_q, self.c_k, self.c_v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class GemmaStyle(nn.Module):
    """`qkv_proj` with rows of 4 q heads, then 1 k head, then 1 v head, as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = H, 1, D
        self.qkv_proj, self.o_proj = nn.Linear(E, (H + 2) * D), nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split((H * D, D, D), -1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        return self.o_proj(attended(q, k.expand_as(q), v.expand_as(q)))


class TalkingHeads(nn.Module):
    """Heads that are mixed with each other around the softmax.

    Args:
        mix: "before" or "after": a learned matrix before or after the softmax; "beside": that matrix added to the
            scores; "deepvit": a matrix and a norm after the softmax; "selective": scores of the first head are
            subtracted from those of all heads; "scaled": that matrix times the scores scales the weights; "averaged":
            the mean of all scores scales the weights; anything else: no mixing.
    """

    def __init__(self, mix: str) -> None:
        super().__init__()
        self.heads, self.mix, self.to_qkv = H, mix, nn.Linear(E, 3 * H * D, bias=False)
        self.talk, self.norm = nn.Conv2d(H, H, 1, bias=False), nn.LayerNorm(H)
        nn.init.dirac_(self.talk.weight)  # the identity, as in x-transformers: nothing is mixed yet
        self.reattend = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, -1))
        scores = q @ k.mT
        if self.mix == "selective":  # the first head decides what the others ignore
            masking = scores[:, :1].relu().cumsum(-2).roll(1, -2)
            scores = scores - masking * (torch.arange(x.shape[1]) > 0).unsqueeze(-1)
        if self.mix == "beside":
            scores = scores + self.talk(scores)
        weights = (self.talk(scores) if self.mix == "before" else scores).softmax(-1)
        if self.mix == "after":
            weights = self.talk(weights)
        if self.mix == "scaled":
            weights = weights * self.talk(scores)
        if self.mix == "averaged":
            weights = weights * scores.mean(1, keepdim=True)
        if self.mix == "deepvit":
            weights = torch.einsum("bhij,hg->bgij", weights, self.reattend)
            weights = self.norm(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ v).transpose(1, 2).flatten(2)


class Windowed(nn.Module):
    """Samples, windows and heads merged into one axis, [B * W * H, T, D], as in SAM's image encoder."""

    def __init__(self, windows: int = 64) -> None:
        super().__init__()
        self.num_heads, self.windows, self.qkv = H, windows, nn.Linear(E, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.windows, -1)).flatten(0, 1)  # [B * W, T, E]
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).flatten(1, 2)  # [B * W * H, T, D]
        return (q @ k.mT).softmax(-1) @ v

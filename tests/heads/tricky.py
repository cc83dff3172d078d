"""Attention whose names mislead: packed otherwise than its signature says, paired otherwise, or out of sight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

H, D, E = 4, 3, 12  # heads, features per head, width


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, T, D] each -> [B, T, H * D]."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OwnCheckpoint(torch.autograd.Function):
    """As diffusion code has it: run without gradients, run again in the backward pass."""

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
    """Packed head by head along channels, [B, H * 3 * D, T], behind a checkpoint of its own."""

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


class Opaque(torch.autograd.Function):
    """Attention without a softmax that could be seen, as a Triton kernel has it."""

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


class KernelAttention(nn.Module):
    """Interleaved heads in a function the trace cannot look into."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.to_qkv = H, nn.Linear(E, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (H, 3, D)).permute(3, 0, 2, 1, 4)
        return Opaque.apply(q, k, v).transpose(1, 2).flatten(2)  # type: ignore[no-untyped-call,no-any-return]


class MosaicAttention(nn.Module):
    """`Wqkv` with fewer key-value heads, whose number has an unusual name, and no head width."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.kv_n_heads = H, 2
        self.Wqkv = nn.Linear(E, (H + 2 * 2) * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).split((H * D, 2 * D, 2 * D), -1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        return attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


class FeatureFirst(nn.Module):
    """einops' `b t (d h)`: the head is the fastest axis."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.to_qkv = H, nn.Linear(E, 3 * H * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (D, H)).permute(0, 3, 1, 2) for y in self.to_qkv(x).chunk(3, -1))
        return attended(q, k, v)


class Tiled(nn.Module):
    """Key-value heads tiled: q heads 0 and 2 share kv head 0. `eager` writes scores out."""

    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.eager = H, 2, eager
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, n * D, bias=False) for n in (H, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) if self.eager else attended(q, k, v)


class JointAttention(nn.Module):
    """As in SD3 and Flux: text and picture have projections of their own and attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = H
        self.to_q, self.to_k, self.to_v = (nn.Linear(E, H * D) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(E, H * D) for _ in range(3))

    def forward(self, picture: Tensor, text: Tensor) -> Tensor:
        own = (self.to_q, self.to_k, self.to_v)
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        both = (torch.cat([f(picture), g(text)], 1) for f, g in zip(own, added, strict=True))
        return attended(*(x.unflatten(-1, (H, D)).transpose(1, 2) for x in both))


class InProjection(nn.Module):
    """As newer open_clip: nn.MultiheadAttention's weight in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.in_proj_weight = H, nn.Parameter(torch.randn(3 * H * D, E))
        self.out_proj = nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.in_proj_weight).chunk(3, -1)
        return self.out_proj(attended(*(y.unflatten(-1, (H, D)).transpose(1, 2) for y in (q, k, v))))


class NanochatAttention(nn.Module):
    """`c_q`, `c_k`, `c_v` with fewer key-value heads."""

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
    """`qkv_proj`: q, then fewer rows of k and of v."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = H, 1, D
        self.qkv_proj, self.o_proj = nn.Linear(E, (H + 2) * D), nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split((H * D, D, D), -1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        return self.o_proj(attended(q, k.expand_as(q), v.expand_as(q)))


class TalkingHeads(nn.Module):
    """Heads mixed by a learned matrix: before the softmax, after it, or after it with a norm, as in DeepViT."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        self.heads, self.mix, self.to_qkv = H, mix, nn.Linear(E, 3 * H * D, bias=False)
        self.talk, self.norm = nn.Conv2d(H, H, 1, bias=False), nn.LayerNorm(H)
        nn.init.dirac_(self.talk.weight)  # as x-transformers starts it: nothing is mixed yet
        self.reattend = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, -1))
        scores = q @ k.mT
        if self.mix == "selective":  # the first head tells the others what to forget
            told = scores[:, :1].relu().cumsum(-2).roll(1, -2)
            scores = scores - told * (torch.arange(x.shape[1]) > 0).unsqueeze(-1)
        if self.mix == "beside":
            scores = scores + self.talk(scores)
        weights = (self.talk(scores) if self.mix == "before" else scores).softmax(-1)
        if self.mix == "after":
            weights = self.talk(weights)
        if self.mix == "deepvit":
            weights = torch.einsum("bhij,hg->bgij", weights, self.reattend)
            weights = self.norm(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ v).transpose(1, 2).flatten(2)


class Windowed(nn.Module):
    """Windows, samples and heads in one axis, as in SAM's picture encoder: [B * W * H, T, D]."""

    def __init__(self, windows: int = 64) -> None:
        super().__init__()
        self.num_heads, self.windows, self.qkv = H, windows, nn.Linear(E, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.windows, -1)).flatten(0, 1)  # [B * W, T, E]
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).flatten(1, 2)  # [B * W * H, T, D]
        return (q @ k.mT).softmax(-1) @ v

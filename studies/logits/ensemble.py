"""Train many small byte-level language models at once, each with its own force between heads.

All models of a wave have the same shape and differ in seed, learning rate and arm. Their parameters carry a leading
axis E, so one batched product serves every model and hundreds of runs share one GPU. The models do not interact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

VOCAB = 256
LAYERED = ("wq", "wk", "wv", "wo", "gate", "up", "down", "norm1", "norm2")


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its training.

    Args:
        layers, heads, width: of the decoder; the feed-forward block is 8/3 of the width.
        batch, length: sequences per step, bytes per sequence.
        steps: optimizer steps of a run without `extra`.
        sequences, positions: the force is computed from `positions` tokens of each of `sequences` sequences.
        kv_heads: number of key-value heads; 0 for as many as query heads.
        tied: use the embedding as the output matrix, too.
    """

    layers: int
    heads: int
    width: int
    batch: int
    length: int
    steps: int
    sequences: int = 8
    positions: int = 64
    kv_heads: int = 0
    warmup: int = 100
    tied: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        return (8 * self.width // 3 + 31) // 32 * 32


@dataclass(frozen=True)
class Arm:
    """What a run adds to plain training.

    Args:
        name: row of the table.
        qk: weight of the mean cosine between logit functions; negative attracts.
        ov: the same for value-output circuits.
        ratio: instead of a fixed weight, hold |force| / |gradient| of q and k at this value (sign as `qk`).
        centred: subtract the mean key of a sequence, to which softmax is invariant.
        partner: "own" layer, "next" layer (the wrong partner), or "noise": a random force of the same norm.
        pairs: which pairs count: "all", "positive" (cosine > 0), "near" (cosine > 0.5), "rbf" (kernel weights).
        rotated: compare logits after RoPE, at distances drawn from the data, not at distance 0.
        parts: projections that receive the force.
        layers: "all", "first" half, "last" half.
        phase: share of training in which the force acts, (from, to).
        every: steps for which a force is reused before it is computed again.
        qk_rate, qk_decay: factors on learning rate and weight decay of q and k.
        rate_phase: share of training in which `qk_rate` holds, (from, to).
        qk_scale: factor on the initial q and k.
        decay: weight decay.
        norm: RMSNorm on each head's q and k.
        drop: DropHead probability.
        extra: additional steps, as a share of the steps.
    """

    name: str
    qk: float = 0.0
    ov: float = 0.0
    ratio: float = 0.0
    centred: bool = True
    partner: str = "own"
    pairs: str = "all"
    rotated: bool = False
    parts: str = "qk"
    layers: str = "all"
    phase: tuple[float, float] = (0.0, 1.0)
    every: int = 1
    qk_rate: float = 1.0
    rate_phase: tuple[float, float] = (0.0, 1.0)
    qk_decay: float = 1.0
    qk_scale: float = 1.0
    decay: float = 0.1
    norm: bool = False
    drop: float = 0.0
    extra: float = 0.0


@dataclass(frozen=True)
class Run:
    """One model of a wave."""

    arm: Arm
    rate: float
    seed: int


class Wave:
    """Models that are trained together.

    Args:
        size: their shape.
        runs: one per model.
        device: of all models.
        compile: compile the three functions of a step.
    """

    def __init__(self, size: Size, runs: list[Run], device: torch.device, *, compile: bool = True) -> None:
        self.size, self.runs, self.device = size, runs, device
        self.params = self._initial()
        self.first = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self._collect_settings()
        self.cos, self.sin = _angles(size, device)
        wrap: Callable[[Callable], Callable] = torch.compile if compile else lambda function: function
        self._losses, self._energy, self._update = wrap(self.losses), wrap(self.energy), wrap(_adamw)
        self.clock = torch.arange(
            self.steps, device=device, dtype=torch.float32
        )  # a tensor, so that steps are not recompiled
        self.generator = torch.Generator(device).manual_seed(1234)

    def _initial(self) -> dict[str, Tensor]:
        s, count = self.size, len(self.runs)
        shapes = {
            "embed": (VOCAB, s.width),
            "wq": (s.layers, s.width, s.width),
            "wk": (s.layers, s.width, s.keys * s.head),
            "wv": (s.layers, s.width, s.keys * s.head),
            "wo": (s.layers, s.width, s.width),
            "gate": (s.layers, s.width, s.hidden),
            "up": (s.layers, s.width, s.hidden),
            "down": (s.layers, s.hidden, s.width),
            "out": (s.width, VOCAB),
        }
        if s.tied:
            del shapes["out"]
        params = {name: torch.empty(count, *shape) for name, shape in shapes.items()}
        for e, run in enumerate(self.runs):
            generator = torch.Generator().manual_seed(run.seed)
            for name, p in params.items():
                std = 0.02 / math.sqrt(2 * s.layers) if name in ("wo", "down") else 0.02
                p[e].normal_(0, std * (s.width / 512) ** -0.5, generator=generator)
            for name in ("wq", "wk"):
                params[name][e] *= run.arm.qk_scale
        params["norm1"] = torch.ones(count, s.layers, s.width)
        params["norm2"] = torch.ones(count, s.layers, s.width)
        params["norm3"] = torch.ones(count, s.width)
        return {name: p.to(self.device).requires_grad_() for name, p in params.items()}

    def _collect_settings(self) -> None:
        arms = [run.arm for run in self.runs]

        def each(function: Callable[[Arm], float]) -> Tensor:
            return torch.tensor([float(function(arm)) for arm in arms], device=self.device)

        layer = torch.arange(self.size.layers, device=self.device)
        first, last = layer < self.size.layers / 2, layer >= self.size.layers / 2
        chosen = [{"all": first | last, "first": first, "last": last}[arm.layers] for arm in arms]
        self.layer_mask = torch.stack(chosen).float()  # [E, L]
        self.qk, self.ov, self.ratio = each(lambda a: a.qk), each(lambda a: a.ov), each(lambda a: a.ratio)
        self.centred, self.rotated = each(lambda a: a.centred), each(lambda a: a.rotated)
        self.next, self.noise = each(lambda a: a.partner == "next"), each(lambda a: a.partner == "noise")
        self.positive, self.near = each(lambda a: a.pairs == "positive"), each(lambda a: a.pairs == "near")
        self.rbf = each(lambda a: a.pairs == "rbf")
        self.on_q, self.on_k = each(lambda a: "q" in a.parts), each(lambda a: "k" in a.parts)
        self.norm, self.drop = each(lambda a: a.norm), each(lambda a: a.drop)
        self.begin, self.end = each(lambda a: a.phase[0]), each(lambda a: a.phase[1])
        self.rate_begin, self.rate_end = each(lambda a: a.rate_phase[0]), each(lambda a: a.rate_phase[1])
        self.held: dict[str, Tensor] = {}  # forces in use
        self.rate = torch.tensor([run.rate for run in self.runs], device=self.device)
        self.qk_rate, self.qk_decay = each(lambda a: a.qk_rate), each(lambda a: a.qk_decay)
        self.decay = each(lambda a: a.decay)
        self.total = each(lambda a: round(self.size.steps * (1 + a.extra)))
        self.steps = int(self.total.max())

    # -- the model ----------------------------------------------------------------------------------------------

    def losses(self, params: dict[str, Tensor], tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss of every model [E], sampled layer inputs [E, L, S, n, D], and logits.

        Args:
            params: by name, with the leading axis E.
            tokens: [E, B, T + 1] bytes.
            keep: [E, L, M] factors on heads, for DropHead and ablation.
        """
        s = self.size
        count, batch = tokens.shape[:2]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            one_hot = F.one_hot(tokens[..., :-1].flatten(1), VOCAB)  # [E, BT, V]
            one_hot = one_hot.to(torch.bfloat16 if tokens.is_cuda else torch.float32)
            x = torch.bmm(one_hot, params["embed"])  # [E, BT, D]
            layers = {name: params[name].unbind(1) for name in LAYERED}
            sampled = []
            for layer in range(s.layers):
                h = _rms(x, layers["norm1"][layer][:, None])
                picked = h.view(count, batch, s.length, s.width)[:, : s.sequences, :: s.length // s.positions]
                sampled.append(picked[:, :, : s.positions].detach())
                q = self._heads(torch.bmm(h, layers["wq"][layer]), s.heads)
                k = self._heads(torch.bmm(h, layers["wk"][layer]), s.keys)
                v = self._heads(torch.bmm(h, layers["wv"][layer]), s.keys)
                q, k = self._normed(q, 1.0), self._normed(k, 1.0)
                q, k = _rotate(q, self.cos, self.sin), _rotate(k, self.cos, self.sin)
                if s.keys < s.heads:
                    k, v = (t.repeat_interleave(s.heads // s.keys, 2) for t in (k, v))
                mixed = F.scaled_dot_product_attention(
                    q.flatten(0, 1).to(v.dtype), k.flatten(0, 1).to(v.dtype), v.flatten(0, 1), is_causal=True
                ).view(count, batch, s.heads, s.length, s.head)
                mixed = mixed * keep[:, layer][:, None, :, None, None]
                x = x + torch.bmm(mixed.transpose(2, 3).reshape(count, -1, s.width), layers["wo"][layer])
                h = _rms(x, layers["norm2"][layer][:, None])
                hidden = F.silu(torch.bmm(h, layers["gate"][layer])) * torch.bmm(h, layers["up"][layer])
                x = x + torch.bmm(hidden, layers["down"][layer])
            output = params["embed"].mT if s.tied else params["out"]
            logits = torch.bmm(_rms(x, params["norm3"][:, None]), output).float()
        target = tokens[..., 1:].flatten(1)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(count, -1).mean(1)
        return loss, torch.stack(sampled, 1), logits

    def _heads(self, flat: Tensor, heads: int) -> Tensor:
        """[E, BT, heads x d] -> [E, B, heads, T, d]"""
        return flat.view(flat.shape[0], -1, self.size.length, heads, self.size.head).transpose(2, 3)

    def _normed(self, x: Tensor, scale: float) -> Tensor:
        """Apply RMSNorm over the last axis in models whose arm has it."""
        flag = self.norm.view(-1, *([1] * (x.ndim - 1)))
        return torch.where(flag > 0, F.rms_norm(x.float(), x.shape[-1:]) * scale, x.float())

    # -- the force between heads --------------------------------------------------------------------------------

    def cosines(self, wq: Tensor, wk: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines between the logit functions of heads and of their partners, and between heads of the same layer.

        Both are [E, L, M, M]; gradients flow only into the first index of the first one.
        """
        s = self.size
        x = tokens.float().flatten(2, 3)  # [E, L, N, D]
        split = (s.sequences, s.positions, -1, s.head)
        q = (x @ wq).unflatten(2, split[:2]).unflatten(-1, split[2:])  # [E, L, S, n, M, d]
        k = (x @ wk).unflatten(2, split[:2]).unflatten(-1, split[2:])
        q, k = self._normed(q, 1.0), self._normed(k, 1.0)
        step = s.length // s.positions
        cos, sin = (t[::step][: s.positions, None] for t in (self.cos, self.sin))
        turned = self.rotated.view(-1, 1, 1, 1, 1, 1) > 0
        q, k = torch.where(turned, _rotate(q, cos, sin), q), torch.where(turned, _rotate(k, cos, sin), k)
        k = k - self.centred.view(-1, 1, 1, 1, 1, 1) * k.mean(3, keepdim=True)
        if s.keys < s.heads:
            k = k.repeat_interleave(s.heads // s.keys, 4)
        q, k = q.flatten(2, 3).flatten(3), k.flatten(2, 3).flatten(3)  # [E, L, N, M d]
        fixed_q, fixed_k = q.detach(), k.detach()
        wrong = self.next.view(-1, 1, 1, 1) > 0
        other_q = torch.where(wrong, fixed_q.roll(-1, 1), fixed_q)
        other_k = torch.where(wrong, fixed_k.roll(-1, 1), fixed_k)
        own = self._products(q, q, k, k)
        norms = own.diagonal(dim1=-2, dim2=-1).clamp(min=1e-20).sqrt()
        other_norms = torch.where(wrong[..., 0], norms.detach().roll(-1, 1), norms.detach())
        across = self._products(q, other_q, k, other_k) / norms.unsqueeze(-1) / other_norms.unsqueeze(-2)
        within = own / norms.unsqueeze(-1) / norms.unsqueeze(-2)
        return across, within.detach()

    def _products(self, q: Tensor, p: Tensor, k: Tensor, r: Tensor) -> Tensor:
        """<f_i, g_j> = sum of (q_i^T p_j) * (k_i^T r_j) over d x d, [..., M, M]."""
        s, count = self.size, q.shape[-2]
        shape = (s.heads, s.head, s.heads, s.head)
        queries = (q.mT @ p / count).unflatten(-1, shape[2:]).unflatten(-3, shape[:2])
        keys = (k.mT @ r / count).unflatten(-1, shape[2:]).unflatten(-3, shape[:2])
        return (queries * keys).sum((-3, -1))

    def energy(self, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Energy that is minimised besides the loss, [E, L], and the cosines within layers [E, L, M, M]."""
        s = self.size
        across, within = self.cosines(wq, wk, tokens)
        eye = torch.eye(s.heads, device=across.device)
        wrong = self.next.view(-1, 1, 1, 1)
        counted = 1 - eye * (1 - wrong)  # a head is not its own partner
        value = across.detach()

        def flag(x: Tensor) -> Tensor:
            return x.view(-1, 1, 1, 1)

        d2 = 2 - 2 * value
        median = torch.where(counted > 0, d2, torch.nan).flatten(2).nanmedian(-1).values[..., None, None]
        kernel = torch.exp(-d2 * math.log(max(s.heads, 2)) / median)
        kernel = kernel / ((kernel * counted).sum((-2, -1), keepdim=True) / counted.sum((-2, -1), keepdim=True))
        weight = counted * torch.where(flag(self.positive) > 0, (value > 0).float(), torch.ones_like(value))
        weight = weight * torch.where(flag(self.near) > 0, (value > 0.5).float(), torch.ones_like(value))
        weight = weight * torch.where(flag(self.rbf) > 0, kernel, torch.ones_like(value))
        mean = (weight * across).sum((-2, -1)) / counted.sum((-2, -1))
        total = 2 * self.qk[:, None] * self.layer_mask * mean  # twice, because partners are held fixed
        x = tokens.float().flatten(2, 3)
        v = x @ wv
        if s.keys < s.heads:
            v = v.unflatten(-1, (s.keys, s.head)).repeat_interleave(s.heads // s.keys, -2).flatten(-2)
        outputs = self._products(v, v.detach(), wo.mT, wo.mT.detach())
        size = self._products(v, v, wo.mT, wo.mT).diagonal(dim1=-2, dim2=-1).clamp(min=1e-20).sqrt()
        outputs = outputs / size.unsqueeze(-1) / size.detach().unsqueeze(-2)
        circuits = (outputs * (1 - eye)).sum((-2, -1)) / (s.heads * (s.heads - 1))
        return total + 2 * self.ov[:, None] * self.layer_mask * circuits, within

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Take one optimizer step of every model; return losses [E] and cosines within layers [E, L, M, M]."""
        s, params = self.size, self.params
        keep = torch.rand(len(self.runs), s.layers, s.heads, device=self.device, generator=self.generator)
        keep = (keep >= self.drop[:, None, None]).float() / (1 - self.drop[:, None, None])
        loss, sampled, _ = self._losses(params, tokens, keep)
        names = list(params)
        grads = dict(zip(names, torch.autograd.grad(loss.sum(), [params[n] for n in names]), strict=True))
        moved = [params[n] for n in ("wq", "wk", "wv", "wo")]
        energy, within = self._energy(*moved, sampled)
        force = dict(zip(("wq", "wk", "wv", "wo"), torch.autograd.grad(energy.sum(), moved), strict=True))
        force = self._hold(force, number)
        self._update(
            params,
            grads,
            force,
            self.first,
            self.second,
            self.clock[number],
            s.warmup,
            self.total,
            self.rate,
            self.qk_rate,
            self.decay,
            self.qk_decay,
            self.ratio,
            self.noise,
            self.on_q,
            self.on_k,
            self.begin,
            self.end,
            self.rate_begin,
            self.rate_end,
            self._random(),
        )
        return loss.detach(), within

    def _hold(self, force: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """Replace the forces of models that are due, and keep those of the others."""
        if all(run.arm.every == 1 for run in self.runs):
            return force
        due = torch.tensor([number % run.arm.every == 0 for run in self.runs], device=self.device).view(-1, 1, 1, 1)
        self.held = {name: torch.where(due, new, self.held.get(name, new)) for name, new in force.items()}
        return self.held

    def _random(self) -> dict[str, Tensor]:
        """Random directions for arms that need them."""
        if not any(run.arm.partner == "noise" for run in self.runs):
            return {}
        shapes = {name: self.params[name].shape for name in ("wq", "wk")}
        return {n: torch.randn(s, device=self.device, generator=self.generator) for n, s in shapes.items()}


@torch.no_grad()
def _adamw(
    params,
    grads,
    force,
    first,
    second,
    number,
    warmup,
    total,
    rate,
    qk_rate,
    decay,
    qk_decay,
    ratio,
    noise,
    on_q,
    on_k,
    begin,
    end,
    rate_begin,
    rate_end,
    random,
) -> None:
    """Clip each model's gradient to norm 1, add the force, take an AdamW step with each model's own settings."""
    norm2 = sum(g.float().square().flatten(1).sum(1) for g in grads.values())
    clip = (1 / norm2.sqrt().clamp(min=1e-12)).clamp(max=1)  # [E]
    progress = (number / total).clamp(max=1)
    warm = ((number + 1) / warmup).clamp(max=1)
    scale = rate * warm * (0.1 + 0.45 * (1 + torch.cos(math.pi * progress))) * (number < total)
    active = ((progress >= begin) & (progress < end)).float()
    faster = (progress >= rate_begin) & (progress < rate_end)
    qk_rate = torch.where(faster, qk_rate, torch.ones_like(qk_rate))
    dims = lambda x, p: x.view(-1, *([1] * (p.ndim - 1)))  # noqa: E731
    pair = {n: force[n] for n in ("wq", "wk")}
    layer_norm = lambda d: sum(t.square().sum((-2, -1)) for t in d.values()).sqrt()  # noqa: E731  [E, L]
    size = layer_norm(pair)
    drive = layer_norm({n: grads[n].float() for n in pair}) * clip[:, None]
    factor = torch.where(ratio[:, None] > 0, ratio[:, None] * drive / size.clamp(min=1e-20), torch.ones_like(size))
    if random:
        away = layer_norm(random).clamp(min=1e-20)
        share = (size / away)[..., None, None]
        pair = {n: torch.where(dims(noise, t) > 0, random[n] * share, t) for n, t in pair.items()}
    for name, p in params.items():
        g = grads[name].float() * dims(clip, p)
        if name in pair:
            part = on_q if name == "wq" else on_k
            g = g + pair[name] * factor[..., None, None] * dims(active * part, p)
        elif name in force:
            g = g + force[name] * dims(active, p)
        own = name in pair
        lr = dims(scale * (qk_rate if own else 1), p)
        first[name].mul_(0.9).add_(g, alpha=0.1)
        second[name].mul_(0.95).addcmul_(g, g, value=0.05)
        corrected = first[name] / (1 - 0.9 ** (number + 1))
        root = (second[name] / (1 - 0.95 ** (number + 1))).sqrt() + 1e-8
        if not name.startswith("norm"):
            p.mul_(1 - lr * dims(decay * (qk_decay if own else 1), p))
        p.sub_(lr * corrected / root)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:]) * weight).to(x.dtype)


def _angles(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE, [T, d / 2]."""
    half = size.head // 2
    rates = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(size.length, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., T, d] by position; cos and sin broadcast over [T, d / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

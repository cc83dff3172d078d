"""Train many small byte-level language models at once, each with its own force between heads.

All models of a wave have the same shape and differ in seed, learning rate and arm. Their parameters carry a leading
axis E, so one batched product serves every model and hundreds of runs share one GPU. The models do not interact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from studies.logits.adamw import StepSettings, adamw_step
from studies.logits.settings import Arm, Run, Size
from torch import Tensor
from torch.nn import functional as F

VOCAB = 256
LAYERED = ("wq", "wk", "wv", "wo", "gate", "up", "down", "norm1", "norm2")


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
        self._losses, self._energy, self._update = wrap(self.losses), wrap(self.energy), wrap(adamw_step)
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
        self.qk, self.ov = each(lambda a: a.qk), each(lambda a: a.ov)
        self.centred, self.rotated = each(lambda a: a.centred), each(lambda a: a.rotated)
        self.next = each(lambda a: a.partner == "next")
        self.positive, self.near = each(lambda a: a.pairs == "positive"), each(lambda a: a.pairs == "near")
        self.rbf = each(lambda a: a.pairs == "rbf")
        self.norm, self.drop = each(lambda a: a.norm), each(lambda a: a.drop)
        self.held: dict[str, Tensor] = {}  # forces in use
        self.settings = StepSettings(
            total=each(lambda a: round(self.size.steps * (1 + a.extra))),
            rate=torch.tensor([run.rate for run in self.runs], device=self.device),
            qk_rate=each(lambda a: a.qk_rate),
            decay=each(lambda a: a.decay),
            qk_decay=each(lambda a: a.qk_decay),
            ratio=each(lambda a: a.ratio),
            noise=each(lambda a: a.partner == "noise"),
            on_q=each(lambda a: "q" in a.parts),
            on_k=each(lambda a: "k" in a.parts),
            begin=each(lambda a: a.phase[0]),
            end=each(lambda a: a.phase[1]),
            rate_begin=each(lambda a: a.rate_phase[0]),
            rate_end=each(lambda a: a.rate_phase[1]),
        )
        self.steps = int(self.settings.total.max())

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
        moments = self.first, self.second
        self._update(params, grads, force, *moments, self.clock[number], s.warmup, self.settings, self._random())
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

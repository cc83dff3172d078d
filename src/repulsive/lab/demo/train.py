"""Train one model of the demo: an ordinary training loop, in which `repel` is one line."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive import Heads, repel
from repulsive.diagnostics.circuits import Similarity
from repulsive.errors import DivergedError
from repulsive.lab.demo.settings import BETAS, CLIP, DECAY, PENALTY, REGULARIZED, REPELLED, Settings
from repulsive.lab.demo.text import split
from repulsive.lab.systems.lm.model import CausalAttention, Decoder
from repulsive.regularizers import on_outputs

_MEASURED = 16  # held-out windows on which heads are compared: 2,048 bytes
_EVALUATION_BATCH = 32  # windows


@dataclass(frozen=True)
class Measurement:
    """State of a model during training.

    Args:
        step: optimizer steps so far.
        loss: mean training loss since the last measurement, in nats per byte, without the regularizer.
        mean: cosine between the attention logits of two heads of a layer, mean over pairs and layers.
        largest: the largest such cosine of any pair in any layer.
    """

    step: int
    loss: float
    mean: float
    largest: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model and its measurements.

    Args:
        model: the model.
        history: measurements during training; the last one is of the trained model.
        held_out: loss on the held-out text, in nats per byte.
        cosines: cosines between the attention logits of heads, [M, M] for each layer.
        seconds: CPU time of the training.
    """

    model: Decoder
    history: Sequence[Measurement]
    held_out: float
    cosines: Sequence[Tensor]
    seconds: float


def train(
    arm: str, seed: int, settings: Settings, text: str, report: Callable[[Measurement], Any] = lambda _: None
) -> Trained:
    """Train a language model.

    Models with the same seed start with the same weights and see the same windows in the same order.

    Args:
        arm: "plain", "repelled" or "regularizer".
        seed: random seed of initial weights and data order.
        settings: sizes of the model and of the training.
        text: the text, training and held-out blocks together.
        report: called with each measurement.

    Raises:
        DivergedError: the loss is not finite.
    """
    started = time.process_time()
    data, held_out = split(text)
    model = build(settings, seed)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.rate)
    if arm == REPELLED:
        repel(model, optimizer, settings.rule, verbose=False)
    penalty = Disagreement(model) if arm == REGULARIZED else None

    heads, sample = Heads(model), held_out_sample(held_out, settings.length)
    draw = torch.Generator().manual_seed(seed)
    history, losses, measured = list[Measurement](), list[float](), set(settings.measured)
    for step in range(1, settings.steps + 1):
        starts = torch.randint(len(data) - settings.length, (settings.batch, 1), generator=draw)
        window = data[starts + torch.arange(settings.length + 1)]  # [B, T + 1]
        loss = next_byte_loss(model, window).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss if penalty is None else loss + PENALTY * penalty.value()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step in measured:
            layers = heads.similarity([sample], twins=0)  # verdicts are not shown; twins cost three times this
            history.append(_measurement(step, losses, layers))
            losses.clear()
            report(history[-1])
    if penalty is not None:
        penalty.remove()
    final = evaluate(model, held_out, settings.length)
    return Trained(model.eval(), history, final, [layer.cosine for layer in layers], time.process_time() - started)


def build(settings: Settings, seed: int) -> Decoder:
    """Build the model with random weights, without changing torch's global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(settings.model)


def windows(tokens: Tensor, length: int) -> Tensor:
    """Cut tokens [N] into windows that overlap by one token: [N', length + 1]. A shorter rest is left out."""
    return tokens.unfold(0, length + 1, length)


def held_out_sample(tokens: Tensor, length: int) -> Tensor:
    """Choose the windows on which heads are compared, evenly spaced over the held-out tokens: [16, length]."""
    every = windows(tokens, length)[:, :-1]
    return every[:: max(1, len(every) // _MEASURED)][:_MEASURED]


def next_byte_loss(model: nn.Module, window: Tensor) -> Tensor:
    """Compute the loss of each byte given those before it, in nats: [B, T + 1] -> [B, T]."""
    logits = model(window[:, :-1])  # [B, T, V]
    return F.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, length: int) -> float:
    """Compute the mean loss over all windows of a text, in nats per byte.

    Raises:
        DivergedError: the loss is not finite.
    """
    losses = [next_byte_loss(model, part) for part in windows(tokens, length).split(_EVALUATION_BATCH)]
    loss = float(torch.cat(losses).double().mean())
    if loss != loss or loss == float("inf"):
        raise DivergedError("the held-out loss is not finite; lower the learning rate")
    return loss


class Disagreement:
    """The disagreement regularizer (Li et al., 2018) on the outputs of heads, read by hooks on the output projections.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._outputs: list[Tensor] = []
        attentions = [module for module in model.modules() if isinstance(module, CausalAttention)]
        self._hooks = [each.o_proj.register_forward_pre_hook(self._collect(each.num_heads)) for each in attentions]

    def value(self) -> Tensor:
        """Compute the penalty of the last forward pass, the mean over layers, between 0 and 1."""
        value = torch.stack([on_outputs(outputs) for outputs in self._outputs]).mean()
        self._outputs.clear()
        return value

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._outputs.clear()

    def _collect(self, heads: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def collect(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():
                self._outputs.append(inputs[0].unflatten(-1, (heads, -1)).transpose(1, 2))  # [B, M, T, d]

        return collect


def _measurement(step: int, losses: Sequence[float], layers: Sequence[Similarity]) -> Measurement:
    mean = statistics.fmean(layer.mean for layer in layers)
    return Measurement(step, statistics.fmean(losses), mean, max(layer.largest for layer in layers))

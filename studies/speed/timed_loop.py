"""This package's training loop, one epoch at a time, and the floating-point operations of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.systems.translation.task import Model, Translation, TranslationTask


class TimedLoop(Loop):
    """`Loop` without evaluations, folder and checkpoints."""

    def __init__(self, task: Any, device: str) -> None:
        super().__init__(task, task.recipe, RunFolder(Path("nowhere")), Watcher(), device)
        self._build()

    def one_epoch(self) -> None:
        self.total = self.step + self._per_epoch
        self._train()

    def one_step(self) -> None:
        """Take one step on the first batch, without logging."""
        self._learn(self.task.order(0)[0])
        self.step += 1

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the handle for the length of a `with` block, as `time_inside` expects."""
        self.handle.attach()
        try:
            yield
        finally:
            self.handle.remove()

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self._per_epoch

    def _validate(self) -> None:
        pass

    def _report(self, kind: str, values: dict[str, float]) -> None:
        pass

    def _should_save(self, end_of_epoch: bool) -> bool:
        return False


def open_task(name: str, data: Path, changes: Sequence[str]) -> TranslationTask:
    """Make the task of a recipe; packages that only scores need may be missing."""
    recipe = open_recipe(name, [f"data.folder={data}", "training.average=0", *changes])
    if not isinstance(recipe, Translation):
        raise SystemExit(f"{name}: expected a recipe of translation")
    with _without_scores():
        task = make_task(recipe)
    assert isinstance(task, TranslationTask)
    return task


@contextmanager
def _without_scores() -> Iterator[None]:
    with mock.patch("repulsive.lab.systems.translation.metrics.check_installed"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def operations(sizes: Model, vocabulary: int, source: Tensor, target: Tensor) -> float:
    r"""Floating-point operations of training on some pairs once, without padding and recomputation.

    With $s$ and $t$ tokens of a pair, width $d$, inner width $f$, a vocabulary of $V$ and $E + D$ layers, the forward
    pass takes

    $$E (s (4 d^2 + 2 d f) + 2 s^2 d) + D (t (6 d^2 + 2 d f) + 2 s d^2 + t (t + 1) d + 2 s t d) + t d V$$

    multiply-adds: q, k, v and output of every attention, feed-forward blocks, attention scores and weighted sums of
    values (causal in the decoder), and the output layer. The backward pass takes twice as
    many, and each counts as two operations: six times that.

    Args:
        sizes: of the model.
        vocabulary: V.
        source: number of source tokens of each pair, [N].
        target: number of target tokens, [N].
    """
    s, t = source.double(), target.double()
    d, f, (encoders, decoders) = sizes.width, sizes.feed_forward, sizes.depth
    encoder = s * (4 * d**2 + 2 * d * f) + 2 * s**2 * d
    decoder = t * (6 * d**2 + 2 * d * f) + 2 * s * d**2 + t * (t + 1) * d + 2 * s * t * d
    return 6 * float((encoders * encoder + decoders * decoder + t * d * vocabulary).sum())


def lengths_of(task: TranslationTask) -> tuple[Tensor, Tensor]:
    """Numbers of source and target tokens of every pair that the recipe trains on, [N] each."""
    train = task.data.parts["train"]
    kept = max(1, round(len(train) * task.recipe.data.share))
    source, target = (side.lengths[:kept] for side in train.sentences)
    return source, target


def epoch_of(task: TranslationTask) -> tuple[int, float]:
    """Target tokens of an epoch, without padding, and its operations."""
    source, target = lengths_of(task)
    return int(target.sum()), operations(task.recipe.model, len(task.data.vocabulary), source, target)

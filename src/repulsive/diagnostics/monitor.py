"""Monitor the similarity of heads during training, and warn when heads become too similar."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.hooks.calling import real_queries
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.similarity import Diversity, of_weights
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads import HeadGroup, find_heads

Log = Callable[[str, float, int], None]


class Monitor:
    """Monitor of the similarity of a model's heads inside a training loop.

    For every layer and space it logs `heads/<space>/<name>/cosine` and `.../distance` (means over pairs) and
    `.../effective` (effective number of heads); for outputs also `.../tokens`, the mean cosine between two tokens.

    If example inputs are given, the model runs on them twice, in evaluation mode and without gradients. This adds the
    spaces "attention" and "outputs"; `heads/logit_similarity`, the mean cosine between attention logits of two heads
    over all layers; and `heads/logit_similarity_largest`, the cosine of the most similar pair.

    Args:
        model: any module with heads that `find_heads` finds.
        log: a TensorBoard `SummaryWriter`, or a callable that takes (name, value, step).
        every: number of steps between two measurements.
        example: inputs for the model, a tensor, a tuple or a mapping; None: measure weights only.
        threshold: mean cosine above which heads count as too similar; each layer and space warns once.
        attention: with an example, also measure attention weights, which some fused kernels do not expose.
        match: patterns on group names, as in `find_heads`; None: all.

    Raises:
        SelectionError: `every` is below 1, or `log` is neither callable nor has `add_scalar`.
        NoHeadsFound: the model has no heads.

    Example:
        >>> logged = []
        >>> monitor = Monitor(nn.MultiheadAttention(8, 2), lambda *entry: logged.append(entry), every=10)
        >>> for step in range(11):
        ...     _ = monitor.step()
        >>> sorted({(name, step) for name, _, step in logged})[:2]
        [('heads/weights/k/cosine', 0), ('heads/weights/k/cosine', 10)]
    """

    def __init__(
        self,
        model: nn.Module,
        log: Any,
        *,
        every: int = 100,
        example: object = None,
        threshold: float = 0.9,
        attention: bool = True,
        match: str | list[str] | None = None,
    ) -> None:
        if every < 1:
            raise SelectionError(f"every={every}: must be at least 1")
        if not hasattr(log, "add_scalar") and not callable(log):
            raise SelectionError("log must be a SummaryWriter or a callable that takes (name, value, step)")
        self.model, self.every, self.threshold = model, every, threshold
        self._log: Log = log.add_scalar if hasattr(log, "add_scalar") else log
        self._example, self._attention = example, attention
        self.groups: list[HeadGroup] = find_heads(model, match=match)
        self._parts = [] if example is None else self._all_parts()
        self._layers = None if example is None else find_attention_layers(model, self._parts)
        self._warned: set[tuple[str, str]] = set()
        self._steps = 0

    def step(self, step: int | None = None) -> list[Diversity]:
        """Count one training step, and measure on steps 0, `every`, 2 `every`, ...

        Args:
            step: the number of this step; None: the monitor counts steps.

        Returns:
            The measurements; empty on steps in between.
        """
        number = self._steps if step is None else step
        self._steps = number + 1
        return [] if number % self.every else self.measure(number)

    def measure(self, step: int) -> list[Diversity]:
        """Measure and log now."""
        measured = [*of_weights(self.groups), *self._forward_measurements()]
        for diversity in measured:
            if diversity.num_heads < 2:
                continue  # there are no pairs
            name = f"heads/{diversity.space}/{diversity.name}"
            self._log(f"{name}/cosine", diversity.mean_cosine, step)
            self._log(f"{name}/distance", diversity.mean_distance, step)
            self._log(f"{name}/effective", diversity.effective_heads, step)
            if not math.isnan(diversity.tokens):
                self._log(f"{name}/tokens", diversity.tokens, step)
            self._warn(diversity, step)
        self._log_logits(step)
        return measured

    def _log_logits(self, step: int) -> None:
        if not {"q", "k"} <= {group.part for group in self._parts}:
            return  # no example, or attention without queries and keys
        try:
            layers = circuit_similarity(self.model, [self._example], groups=self._parts).logits
        except HeadLayoutError as error:
            self._parts = []  # it would fail again at the next measurement
            warnings.warn(f"heads/logit_similarity is not logged: {error}", stacklevel=4)
            return
        with_pairs = [layer for layer in layers if layer.num_heads > 1]
        if with_pairs:
            self._log("heads/logit_similarity", statistics.fmean(layer.mean for layer in with_pairs), step)
            self._log("heads/logit_similarity_largest", max(layer.largest for layer in with_pairs), step)

    def _forward_measurements(self) -> Iterator[Diversity]:
        if self._example is None:
            return
        for captured in capture(self.model, self._example, weights=self._attention, layers=self._layers).layers:
            real = real_queries(self._example, captured.layer.where)
            yield captured.diversity("outputs", real)
            if self._attention:
                yield captured.diversity("attention", real)

    def _warn(self, measured: Diversity, step: int) -> None:
        if measured.mean_cosine > self.threshold and (measured.name, measured.space) not in self._warned:
            self._warned.add((measured.name, measured.space))
            warnings.warn(
                f"step {step}: the {measured.num_heads} heads of {measured.name} are too similar in {measured.space}: "
                f"mean cosine {measured.mean_cosine:.3f} is above {self.threshold:g}, effective number of heads "
                f"{measured.effective_heads:.1f}; repel(model, optimizer) keeps heads different",
                stacklevel=4,
            )

    def _all_parts(self) -> list[HeadGroup]:
        """Find all q, k and v groups of the matched layers, also those that `match` excludes, to find whole layers."""
        layers = {(group.stack, group.where, group.layer) for group in self.groups}
        return [g for g in find_heads(self.model) if (g.stack, g.where, g.layer) in layers]

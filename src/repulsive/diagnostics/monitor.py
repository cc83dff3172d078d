"""Watch heads while a model trains: every so many steps how diverse they are, and a warning when they collapse."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.diversity import Diversity, of_weights
from repulsive.diagnostics.hooks.calling import real_queries
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.hooks.outlets import find_outlets
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads import HeadGroup, find_heads

Log = Callable[[str, float, int], None]


class Monitor:
    """Measures the diversity of a model's heads from inside a training loop.

    For every layer and space it logs `heads/<space>/<name>/cosine` and `.../distance` (means over pairs) and
    `.../effective` (effective number of heads); of outputs also `.../tokens`, the mean cosine of two tokens. Weights
    cost one pass over the attention weights; with an example the model also runs it twice, in evaluation mode and
    without gradients: for what heads look at and what leaves them, and for `heads/logit_similarity`, the mean cosine
    of two heads' attention logits over layers, and `heads/logit_similarity_largest`, that of the most similar pair.

    Args:
        model: any module with heads that `find_heads` finds.
        log: a TensorBoard `SummaryWriter`, or a callable that takes (name, value, step).
        every: steps between two measurements.
        example: inputs for the model, a tensor, a tuple or a mapping; None: weights alone.
        threshold: mean cosine above which a layer counts as collapsed. One warning per layer and space.
        attention: with an example, also measure attention weights, which some kernels keep to themselves.
        match: patterns on group names, as in `find_heads`; None: all.

    Raises:
        SelectionError: `every` is below 1, or `log` can neither be called nor has `add_scalar`.
        NoHeadsFound: there is nothing to watch.

    Example:
        >>> seen = []
        >>> monitor = Monitor(nn.MultiheadAttention(8, 2), lambda *entry: seen.append(entry), every=10)
        >>> for step in range(11):
        ...     _ = monitor.step()
        >>> sorted({(name, step) for name, _, step in seen})[:2]
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
            raise SelectionError(f"every={every}: measure every 1 step or more")
        if not hasattr(log, "add_scalar") and not callable(log):
            raise SelectionError("log must be a SummaryWriter or a callable that takes (name, value, step)")
        self.model, self.every, self.threshold = model, every, threshold
        self._log: Log = log.add_scalar if hasattr(log, "add_scalar") else log
        self._example, self._attention = example, attention
        self.groups: list[HeadGroup] = find_heads(model, match=match)
        self._parts = [] if example is None else self._all_parts()
        self._outlets = None if example is None else find_outlets(model, self._parts)
        self._warned: set[tuple[str, str]] = set()
        self._steps = 0

    def step(self, step: int | None = None) -> list[Diversity]:
        """Call once per training step: measures on steps 0, `every`, 2 `every`, ...

        Args:
            step: the number of this step; None: counted here.

        Returns:
            What was measured; empty on the steps between.
        """
        number = self._steps if step is None else step
        self._steps = number + 1
        return [] if number % self.every else self.measure(number)

    def measure(self, step: int) -> list[Diversity]:
        """Measure and log now."""
        found = [*of_weights(self.groups), *self._running()]
        for diversity in found:
            if diversity.num_heads < 2:
                continue  # one head has no other to be like
            name = f"heads/{diversity.space}/{diversity.name}"
            self._log(f"{name}/cosine", diversity.mean_cosine, step)
            self._log(f"{name}/distance", diversity.mean_distance, step)
            self._log(f"{name}/effective", diversity.effective_heads, step)
            if not math.isnan(diversity.tokens):
                self._log(f"{name}/tokens", diversity.tokens, step)
            self._warn(diversity, step)
        self._log_logits(step)
        return found

    def _log_logits(self, step: int) -> None:
        if not {"q", "k"} <= {group.part for group in self._parts}:
            return  # no example, or attention without queries and keys
        try:
            layers = circuit_similarity(self.model, [self._example], groups=self._parts).logits
        except HeadLayoutError as error:
            self._parts = []  # it will be the same at the next measurement
            warnings.warn(f"heads/logit_similarity is not logged: {error}", stacklevel=4)
            return
        several = [layer for layer in layers if layer.num_heads > 1]
        if several:
            self._log("heads/logit_similarity", statistics.fmean(layer.mean for layer in several), step)
            self._log("heads/logit_similarity_largest", max(layer.largest for layer in several), step)

    def _running(self) -> Iterator[Diversity]:
        if self._example is None:
            return
        for layer in capture(self.model, self._example, weights=self._attention, outlets=self._outlets).layers:
            real = real_queries(self._example, layer.outlet.where)
            yield layer.diversity("outputs", real)
            if self._attention:
                yield layer.diversity("attention", real)

    def _warn(self, found: Diversity, step: int) -> None:
        if found.mean_cosine > self.threshold and (found.name, found.space) not in self._warned:
            self._warned.add((found.name, found.space))
            warnings.warn(
                f"step {step}: the {found.num_heads} heads of {found.name} have collapsed in {found.space}: mean "
                f"cosine {found.mean_cosine:.3f} is above {self.threshold:g}, {found.effective_heads:.1f} "
                "effective heads; repel(model, optimizer) keeps heads apart",
                stacklevel=4,
            )

    def _all_parts(self) -> list[HeadGroup]:
        """An outlet needs all parts of its layer, whatever `match` left."""
        layers = {(group.stack, group.where, group.layer) for group in self.groups}
        return [g for g in find_heads(self.model) if (g.stack, g.where, g.layer) in layers]

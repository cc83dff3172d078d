"""`Heads`: inspect, compare and ablate the attention heads of a model."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repulsive.diagnostics.attention_figure import attention_figure
from repulsive.diagnostics.captured_similarity import contributions
from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, check_layer_names, find_attention_layers
from repulsive.diagnostics.hooks.calling import call
from repulsive.diagnostics.hooks.capture import Captured, capture
from repulsive.diagnostics.hooks.measured_layers import tied_message, warn_about_guesses
from repulsive.diagnostics.hooks.traced_projections import traced_projections
from repulsive.diagnostics.importance import Loss, first_order_importance
from repulsive.diagnostics.output_patching import patched_outputs
from repulsive.diagnostics.redundancy import ablate, head_place, heads_of
from repulsive.diagnostics.similarity_table import SimilarityTable
from repulsive.diagnostics.untrained_baseline import SPACES, TWINS, Space, against_chance
from repulsive.errors import SelectionError, check_whole, did_you_mean, warn_user
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.describe import count_of

Mode = Literal["zero", "mean", "patch"]
MODES: tuple[Mode, ...] = ("zero", "mean", "patch")


class Heads:
    """The attention heads of a model, with methods to capture, ablate, measure and plot them.

    Layers are counted from 0 in the order of the model, heads from 0 within their layer; with grouped key-value heads
    a head is a query head. Nothing here changes the model: hooks exist only while a method or a `with` block runs.

    Args:
        model: any module with heads that `find_heads` finds.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments. With an example the heads are
            proved, and those of unknown classes are inferred.
        out: dotted name of an attention module -> dotted name of its output projection. With example inputs it is
            needed only if neither names nor a trace show the projection.

    Raises:
        NoHeadsFound: the model has no heads.
        HeadLayoutError: a layout is wrong, or a layer has no output projection as wide as its heads.
        SelectionError: `out` names a module that is not an attention layer.

    Example:
        >>> x = torch.ones(2, 5, 8)
        >>> heads = Heads(nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x))
        >>> heads.shape
        [('', 2)]
        >>> heads.attention((x, x, x))[0].shape, heads.outputs((x, x, x))[0].shape
        (torch.Size([2, 2, 5, 5]), torch.Size([2, 5, 2, 8]))
    """

    def __init__(self, model: nn.Module, example_inputs: object = None, *, out: dict[str, str] | None = None) -> None:
        self.model = model
        self.groups: list[HeadGroup] = find_heads(model, example_inputs)
        check_layer_names(out or {}, self.groups)
        if message := tied_message(model, self.groups):
            warn_user(message)
        if example_inputs is None:
            warn_about_guesses(self.groups)
        else:
            out = traced_projections(model, self.groups, example_inputs, out)
        self.layers: list[AttentionLayer] = find_attention_layers(model, self.groups, out=out)
        self._example = example_inputs
        self._out = out

    # -- list of heads --------------------------------------------------------------------------------------------

    @property
    def shape(self) -> list[tuple[str, int]]:
        """Name and number of heads of every attention layer."""
        return [(layer.name, layer.num_heads) for layer in self.layers]

    def __len__(self) -> int:
        return sum(layer.num_heads for layer in self.layers)

    def __iter__(self) -> Iterator[Head]:
        return (Head(self, layer, head) for layer, head in heads_of(self.layers))

    def __getitem__(self, place: tuple[int, int]) -> Head:
        """Return one head: `heads[3, 5]` is head 5 of layer 3."""
        if not isinstance(place, tuple) or len(place) != 2:
            raise SelectionError(f"heads[{place!r}]: expected a layer and a head, such as heads[3, 5]")
        return Head(self, *head_place(self.layers, place))

    def proofs(self) -> dict[str, str]:
        """How the layout of each group of heads is known: "proved", "table", "given" or "guess"."""
        return {group.name: group.proof for group in self.groups}

    # -- capture --------------------------------------------------------------------------------------------------

    def attention(self, inputs: object) -> list[Tensor | None]:
        """Capture the attention weights of every layer, whatever backend the model uses.

        Args:
            inputs: a tensor, a tuple of arguments or a mapping of keyword arguments.

        Returns:
            Per layer [B, M, T, S]; [R, B, M, T, S] for a layer that runs R > 1 times, as in ALBERT; None for a layer
            that the inputs do not reach. These are results of softmax: what the model does with them later, such as
            mixing heads, is not part of them.
        """
        return self._per_layer(self._capture(inputs, weights=True), lambda captured: list(captured.weights))

    def outputs(self, inputs: object) -> list[Tensor | None]:
        r"""Capture the contribution of every head after its output projection, $W^O_h o_h$.

        The sum of a layer's contributions is its output without the bias of the output projection. A layer
        without an output projection gives the outputs of its heads as they are.

        Returns:
            Per layer [B, T, M, d_model]; [R, B, T, M, d_model] for a layer that runs R > 1 times; None for a layer
            that the inputs do not reach.
        """
        return self._per_layer(self._capture(inputs, weights=False), contributions)

    # -- ablate ---------------------------------------------------------------------------------------------------

    @contextmanager
    def ablated(self, heads: Iterable[tuple[int, int]], mode: Mode = "zero", source: object = None) -> Iterator[None]:
        """Ablate heads inside this context: replace their outputs.

        Args:
            heads: (layer, head) pairs. An empty list changes nothing, so that a loop over sets of heads may start with
                the whole model.
            mode: "zero"; "mean": the head's mean output over the tokens of `source`; "patch": the head's outputs on
                `source`, token by token (activation patching).
            source: inputs for "mean" (default: the example inputs) and "patch".

        Raises:
            SelectionError: there is no such head, mode or source, or the patched inputs have another shape.
        """
        if not isinstance(heads, Iterable):
            raise SelectionError(f"{heads!r}: expected a list of (layer, head) pairs, such as [(0, 1)]")
        chosen = list(heads)
        if mode not in MODES:
            raise SelectionError(f"mode={mode!r}: {did_you_mean(mode, MODES)}choose 'zero', 'mean' or 'patch'")
        if mode == "zero":
            if source is not None:
                raise SelectionError("source is not used with mode='zero'; choose mode='mean' or mode='patch'")
            with ablate(self.model, chosen, layers=self.layers):
                yield
            return
        source = self._example if source is None and mode == "mean" else source
        if source is None:
            raise SelectionError(f"mode={mode!r} needs source=, the inputs that the replaced outputs are taken from")
        with patched_outputs(self.model, self.layers, chosen, mode, source):
            yield

    # -- measure --------------------------------------------------------------------------------------------------

    def importance(self, batches: Iterable[Any], loss: Loss | None = None, *, normalise: bool = False) -> Tensor:
        r"""Estimate how much the loss depends on each head, to first order: $E\,|o_h^\top \partial L / \partial o_h|$.

        Args:
            batches: inputs; with `loss=None` mappings that contain labels, so that the model returns its loss.
            loss: called with the model and a batch; returns a scalar.
            normalise: divide by the l2 norm over the heads of each layer, so that layers are comparable.

        Returns:
            float64 [layers, heads]; nan where a layer has fewer heads.

        Raises:
            SelectionError: `batches` is not a list of batches or is empty, or the loss is not a scalar.
        """
        _check_batches(batches, Iterable, "importance")
        return first_order_importance(self.model, loss or _own_loss, batches, normalise=normalise, layers=self.layers)

    def similarity(
        self, batches: Sequence[Any], space: Space = "logits", *, twins: int = TWINS, seed: int = 0
    ) -> SimilarityTable:
        """Measure how similar the heads of each layer are; compare with untrained twins and with permuted heads.

        Args:
            batches: inputs, each as for `attention`. Intervals and verdicts need at least two sequences.
            space: where to compare heads: "logits" (QK circuit: attention logits over independent tokens, keys
                centred), "ov" (OV circuit), "attention" (attention weights minus uniform attention), "outputs"
                (contributions after the output projection), or "cka" (linear CKA of these contributions, which ignores
                rotations).
            twins: number of untrained twins, which need memory for a second model; 0 gives no verdicts.
            seed: random seed of token samples and of the twins' weights.

        Returns:
            A list with one entry per layer that ran: the matrix [M, M], its mean over pairs and its largest pair, each
            with its confidence interval. `verdicts` has the verdict of each layer against untrained twins,
            `permuted_verdicts` that against heads of different layers; printed, it is a table.

        Raises:
            SelectionError: an argument is wrong, or no token counts.
            HeadLayoutError: the heads of no layer can be compared in this space.
        """
        _check_batches(batches, Sequence, "similarity")
        if not batches:
            raise SelectionError("batches: the list is empty; pass at least one batch")
        check_whole("twins", twins, least=0)
        if space not in SPACES:
            raise SelectionError(f"space={space!r}: {did_you_mean(space, SPACES)}choose one of {', '.join(SPACES)}")
        result = against_chance(
            self.model, batches, spaces=(space,), twins=twins, seed=seed, groups=self.groups, out=self._out
        )
        if not (compared := getattr(result, space)):
            raise SelectionError(
                f"space={space!r}: no token counts in any layer; padding does not count, and in space='attention' "
                "neither do queries that can attend to one key only"
            )
        return SimilarityTable(space, compared, result.notes)

    # -- show -----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        shown = [f"  {i:>3}  {name or '(model)'}: {count} heads" for i, (name, count) in enumerate(self.shape)]
        if len(shown) > 12:
            shown = [*shown[:6], f"  ...  {len(shown) - 11} more layers", *shown[-5:]]
        proofs = sorted(set(self.proofs().values()))
        head = f"Heads of {type(self.model).__name__}: {count_of(len(self.layers), 'layer')}, {len(self)} heads"
        return "\n".join([f"{head} ({', '.join(proofs)})", *shown])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{i}</td><td>{html.escape(name or '(model)')}</td><td>{count}</td></tr>"
            for i, (name, count) in enumerate(self.shape)
        )
        title = html.escape(repr(self).splitlines()[0])
        return f"<b>{title}</b><table><tr><th>layer</th><th>module</th><th>heads</th></tr>{rows}</table>"

    def plot(self, inputs: object, layer: int, item: int = 0) -> Any:
        """Draw the attention of every head of one layer on one item, with Matplotlib.

        Args:
            inputs: as for `attention`.
            layer: index of the layer.
            item: index in the batch.

        Returns:
            A `matplotlib.figure.Figure`; its colour scale is shared by all heads.
        """
        weights = self.attention(inputs)[self[layer, 0].layer]
        if weights is None:
            raise SelectionError(f"layer {layer} ({self.layers[layer].name}) did not run on these inputs")
        weights = weights.flatten(0, -5)[-1] if weights.ndim == 5 else weights  # [B, M, T, S]
        if not -len(weights) <= item < len(weights):
            raise SelectionError(f"item={item}: the inputs have items 0 to {len(weights) - 1}")
        maps = weights[item]  # [M, T, S]
        return attention_figure(maps, f"layer {layer}: {self.layers[layer].name}")

    # -- private --------------------------------------------------------------------------------------------------

    def _capture(self, inputs: object, *, weights: bool) -> list[Captured]:
        return capture(self.model, inputs, weights=weights, layers=self.layers).layers

    def _per_layer(self, captured: Sequence[Captured], read: Any) -> list[Tensor | None]:
        by_name = {each.name: read(each) for each in captured}
        runs = [by_name.get(layer.name) for layer in self.layers]
        return [None if not each else each[0] if len(each) == 1 else torch.stack(each) for each in runs]


class Head:
    """One head of a model: `heads[layer, index]`.

    Args:
        heads: all heads of the model.
        layer: index of the attention layer.
        index: index of the head within the layer.
    """

    def __init__(self, heads: Heads, layer: int, index: int) -> None:
        self.heads = heads
        self.layer = layer
        self.index = index

    @property
    def name(self) -> str:
        """Name of the attention layer and index of the head."""
        return f"{self.heads.layers[self.layer].name}[{self.index}]"

    def attention(self, inputs: object) -> Tensor:
        """Capture the attention weights of this head, [B, T, S]; with a leading axis if the layer runs repeatedly."""
        return self._own(self.heads.attention(inputs)).select(-3, self.index)

    def output(self, inputs: object) -> Tensor:
        """Capture the contribution of this head after the output projection, [B, T, d_model]."""
        return self._own(self.heads.outputs(inputs)).select(-2, self.index)

    def ablated(self, mode: Mode = "zero", source: object = None) -> Any:
        """Replace the output of this head inside a `with` block; see `Heads.ablated`."""
        return self.heads.ablated([(self.layer, self.index)], mode, source)

    def __repr__(self) -> str:
        return f"Head {self.index} of layer {self.layer} ({self.heads.layers[self.layer].name or 'model'})"

    def _own(self, values: Sequence[Tensor | None]) -> Tensor:
        own = values[self.layer]
        if own is None:
            raise SelectionError(
                f"layer {self.layer} ({self.heads.layers[self.layer].name}) did not run on these inputs"
            )
        return own


def _check_batches(batches: object, expected: type, method: str) -> None:
    """Raise an error unless `batches` holds several inputs, such as a list."""
    if not isinstance(batches, expected) or isinstance(batches, str | Tensor | Mapping):
        kinds = {Tensor: "one tensor", Mapping: "one mapping"}
        kind = next((name for one, name in kinds.items() if isinstance(batches, one)), type(batches).__name__)
        is_one = isinstance(batches, str | Tensor | Mapping) or not isinstance(batches, Iterable)
        remedy = f"write {method}([inputs])" if is_one else "pass some of its batches as a list"
        raise SelectionError(f"batches: expected a list of batches, got {kind}; {remedy}")


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    result = call(model, batch)
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if not isinstance(loss, Tensor):
        raise SelectionError("the model returned no loss; add labels to the inputs, or pass loss=")
    return loss

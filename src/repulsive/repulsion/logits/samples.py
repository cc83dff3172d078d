"""Sampled tokens of each projection, with their projected values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import RuleError, warn_user
from repulsive.heads.layout import as_slice, whole_tensor
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.particles.gram import compute_dtype
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.find_projections import tensor_parallel_error
from repulsive.repulsion.logits.norms import NormFormula, formula_of
from repulsive.repulsion.logits.projections import CircuitLayer, Projection
from repulsive.repulsion.logits.token_positions import Positions, choose

# Warnings by the length of the longest sequence.
_NO_PAIRS = (
    "every token of the first sampled batch is masked, so its heads are not repelled. Check the mask that the model is "
    "called with: tokens are 1 or True and padding 0 or False, the other way round in `key_padding_mask`",
    "every sequence of the first sampled batch has only one token, so logits have no effect and its heads are not "
    "repelled. Exclude the layer with match=..., or choose space='sphere'",
)


@dataclass(frozen=True)
class Sample:
    """Sampled tokens of one projection.

    Args:
        inputs: input of each weight of the projection, [N, D_in] each.
        outputs: projected tokens [N, M, d] with all biases, before any norm.
        weights: 1 for a real token, 0 for padding, [N].
        sequences: index of the sequence that each token belongs to, int64 [N]; every rank counts from 0.
        count: number of sequences of a rank.
        rounding: relative size below which a force from these tokens is rounding error; see `rounding_of`.
        norm: norm on q, k or v during the forward pass, or None.
        clip: limit to which values are clipped after the norm, or None.
        is_full: see `Positions`.
        ranks: number of ranks whose tokens follow each other, equally many of each.
    """

    inputs: tuple[Tensor, ...]
    outputs: Tensor
    weights: Tensor
    sequences: Tensor
    count: int
    rounding: float | Tensor
    norm: NormFormula | None = None
    clip: float | None = None
    is_full: bool = False
    ranks: int = 1

    @property
    def is_changed(self) -> bool:
        """Whether a norm or clipping follows the projection."""
        return self.norm is not None or self.clip is not None


@dataclass
class _Source:
    """What `Samples.take` needs to know of a projection, looked up once.

    Args:
        projection: the projection.
        is_torch: whether it belongs to `nn.MultiheadAttention`.
        sizes: number of heads and width of a head.
        columns: output features of all heads; a slice if they follow each other.
        features: number of output features of the module, of all heads and all parts.
        adapters: modules of LoRA adapters, whose inputs are recorded.
        norm: the last formula of the norm on its output; None before the first sample.
    """

    projection: Projection
    is_torch: bool
    sizes: tuple[int, int]
    columns: Tensor | slice
    features: int
    adapters: list[nn.Module]
    norm: NormFormula | None = None

    @classmethod
    def of(cls, projection: Projection) -> _Source:
        rows = projection.rows.flatten()
        columns = as_slice(rows) or rows
        modules = [target.slice.module for target in projection.targets if not target.is_bias]
        adapters = modules if modules[0] is not projection.output else []
        sizes = projection.group.num_heads, projection.width
        features = projection.group.slices[0].features
        return cls(projection, projection.is_torch, sizes, columns, features, adapters)

    def take_columns(self, outputs: Tensor) -> Tensor:
        """Select the features of heads from projected tokens, [N, features] -> [N, M, d]."""
        if isinstance(self.columns, Tensor):
            self.columns = self.columns.to(outputs.device)
            outputs = outputs[:, self.columns]
        elif self.columns != slice(0, outputs.shape[-1]):
            outputs = outputs[:, self.columns]
        return outputs.view(-1, *self.sizes)

    def project(self, tokens: Tensor) -> Tensor:
        """Project tokens by the weights of `nn.MultiheadAttention`, [N, D_in] -> [N, M d]."""
        # Views: an index of rows would be copied to the device, and such a copy waits for all work of a GPU.
        weight, *bias = (one.slice.take(one.slice.parameter().detach()) for one in self.projection.targets)
        flat = [values.flatten().to(tokens.dtype) for values in bias]
        return F.linear(tokens, weight.to(tokens.dtype).view(-1, tokens.shape[-1]), *flat)


class _LastRows:
    """Sampled rows of the last tensor; q and k of a layer often have the same input, and sometimes the same output.

    Only another part of the same layer gets the same rows: in compiled models a later layer may reuse the memory.
    """

    def __init__(self) -> None:
        self._number = -1
        self._parts: list[str] = []
        self._tensor: Tensor | None = None
        self._at: Positions | None = None
        self._rows: Tensor | None = None

    def take(self, key: tuple[int, str], tensor: Tensor, projection: Projection, at: Positions) -> Tensor:
        """Take the sampled rows of a tensor of one projection (layer number, part), [N, features]."""
        number, part = key
        if self._tensor is not None and self._rows is not None and self._number == number and self._at is at:
            is_same = self._tensor.data_ptr() == tensor.data_ptr() and self._tensor.shape == tensor.shape
            if is_same and part not in self._parts:
                self._parts.append(part)
                return self._rows
        rows = _flat(tensor, projection).index_select(0, at.index)
        self._number, self._parts, self._tensor, self._at, self._rows = number, [part], tensor, at, rows
        return rows


class Samples:
    """The latest sample of every projection, by layer number and part ("q", "k" or "v").

    Args:
        layers: attention layers.
        tokens: number of tokens to keep from a forward pass.
        seed: seed of the sampled positions.
    """

    def __init__(self, layers: Sequence[CircuitLayer], tokens: int, seed: int) -> None:
        self.layers, self.tokens, self.seed = list(layers), tokens, seed
        self.step = 0  # optimizer step of the next forward pass
        self.latest: dict[tuple[int, str], Sample] = {}
        self._captured: dict[tuple[int, str], Sample] = {}  # of the last CUDA graph that was captured
        self.adapter_inputs: dict[nn.Module, Tensor] = {}  # inputs of `lora_B` in the last forward pass
        # With their masks, so that no other mask gets the address of one while it is a key.
        self._positions: dict[tuple[object, ...], tuple[Positions, Tensor | None]] = {}
        self._sources: dict[tuple[int, str], _Source] = {}
        self._checked: set[tuple[int, str]] = set()
        self._warned = False
        self._inputs, self._outputs = _LastRows(), _LastRows()

    def clear(self) -> None:
        """Discard all tokens, except those of a CUDA graph, which every replay renews."""
        self.latest = dict(self._captured)
        self.adapter_inputs.clear()
        self._positions.clear()
        self._inputs, self._outputs = _LastRows(), _LastRows()

    def take(
        self,
        number: int,
        part: str,
        given: Tensor,
        result: Tensor,
        valid: Tensor | None,
        shape: tuple[int, int],
    ) -> None:
        """Sample the tokens of one call of a projection.

        Args:
            number: layer number.
            part: "q", "k" or "v".
            given: input of the projection [..., D_in], detached.
            result: output of the projection [..., features], detached; for `nn.MultiheadAttention` the input again.
            valid: bool [B, T], False for padding; None if there is no padding.
            shape: the result of `grid_of`.
        """
        source = self._sources.get((number, part))
        if source is None:
            source = self._sources[number, part] = _Source.of(self.layers[number].watched[part])
        projection = source.projection
        if is_sharded(given) or (not source.is_torch and result.shape[-1] != source.features):
            raise tensor_parallel_error(projection.group.name)
        at = self._choose(shape, valid, given.device)
        flat = self._inputs.take((number, part), given, projection, at)  # [N, D_in]
        if source.is_torch:
            outputs = source.project(flat).unflatten(-1, source.sizes)
        else:
            outputs = source.take_columns(self._outputs.take((number, part), result, projection, at))
        inputs: tuple[Tensor, ...] = (flat,)
        if source.adapters:
            recorded = [self.adapter_inputs[module] for module in source.adapters if module in self.adapter_inputs]
            inputs = tuple(_flat(x, projection).index_select(0, at.index) for x in recorded)
        if (number, part) not in self._checked and not is_capturing():
            self._checked.add((number, part))
            self._warn_without_pairs(part, projection, at)
            if len(inputs) == 1:
                self._check(projection, flat, outputs)
        if (added := projection.added) is not None:
            outputs = outputs + added.take(whole_tensor(added.parameter().detach())).to(outputs.dtype)
        norm = None
        if projection.norm is not None:
            norm = source.norm = formula_of(projection.norm, outputs, projection.group.name, source.norm)
        rounding = rounding_of(outputs)
        sample = Sample(
            inputs, outputs, at.weights, at.sequences, at.count, rounding, norm, projection.clip, at.is_full
        )
        self.latest[number, part] = sample
        if is_capturing():
            self._captured[number, part] = sample

    def _choose(self, shape: tuple[int, int], valid: Tensor | None, device: torch.device) -> Positions:
        """Choose the positions to sample in one call; layers that see the same batch share positions."""
        step = None if is_capturing() else self.step
        key = (shape, device, None if valid is None else valid.data_ptr(), step)
        if key not in self._positions:
            positions = choose(shape, self.tokens, valid, device, seed=self.seed, step=step)
            self._positions[key] = positions, valid
        return self._positions[key][0]

    def _warn_without_pairs(self, part: str, projection: Projection, at: Positions) -> None:
        """Warn once if the first sample has no two keys to choose between, so that its logits have no effect."""
        if part != "k" or self._warned or not len(at.weights):
            return
        lengths = at.weights.new_zeros(at.count).index_add_(0, at.sequences, at.weights)  # [S]
        if (longest := int(lengths.max())) < 2:
            self._warned = True
            warn_user(f"{projection.group.name}: {_NO_PAIRS[longest]}")

    def _check(self, projection: Projection, given: Tensor, outputs: Tensor) -> None:
        """Check on the first sample that the module multiplies its input by the weight that receives the force.

        Raises:
            RuleError: the module computes something else.
        """
        target = projection.targets[0].slice
        weight = target.parameter().detach()
        if is_sharded(weight) or target.module is not projection.output or projection.weight is not None:
            return
        rows = projection.rows.flatten().to(weight.device)
        expected = given @ weight.movedim(target.axis, 0)[rows].to(given.dtype).T
        bias = getattr(target.module, "bias", None)
        if isinstance(bias, Tensor) and not projection.is_torch:
            expected = expected + bias.detach()[rows].to(given.dtype)
        error = float((expected - outputs.flatten(1)).abs().max())
        if not projection.is_torch and error > 0.05 * float(expected.abs().max()) + 1e-6:
            raise RuleError(
                f"{projection.group.name}: {type(target.module).__name__} does more than multiply its input by "
                f"{target.parameter_name}, which space='logits' does not support; choose space='sphere' for this layer"
            )


def rounding_of(tokens: Tensor) -> float:
    """Return the relative size below which a force from projected tokens is rounding error.

    Equal heads may project a half-precision token to different neighbours of the same number.
    """
    if tokens.dtype in (torch.float16, torch.bfloat16):
        return 2**-11
    return 32 * torch.finfo(compute_dtype(tokens)).eps


def grid_of(tokens: Tensor, projection: Projection) -> tuple[int, int]:
    """Return the number of sequences and of tokens per sequence, (B, T)."""
    if tokens.ndim == 2:
        return 1, tokens.shape[0]
    if projection.is_time_first:
        return tokens.shape[1], tokens.shape[0]
    return tokens.shape[0], math.prod(tokens.shape[1:-1])


def _flat(tokens: Tensor, projection: Projection) -> Tensor:
    """Flatten tokens to [B T, D], sequence after sequence."""
    if tokens.ndim == 3 and projection.is_time_first:
        tokens = tokens.transpose(0, 1)
    return tokens.flatten(0, -2)

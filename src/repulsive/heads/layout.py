"""Head layout: the rows of a model's weights that belong to each attention head.

A head is a set of output features of a projection, and each output feature is one row of its weight. `HeadSlice` stores
the row numbers as a table, one line per head. Reading, writing, verifying and selecting heads all work on that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from repulsive.errors import HeadLayoutError, UnsupportedWeights

PROOFS = ("guess", "table", "given", "proved")  # weakest first


def consecutive_rows(heads: int, width: int = 1) -> Tensor:
    """Number features one head after the other, int64 [heads, width], on the CPU whatever the default device is.

    Example:
        >>> consecutive_rows(2, 3).tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    return torch.arange(heads * width, device="cpu").view(heads, width)


def as_slice(rows: Tensor) -> slice | None:
    """Return consecutive, increasing row indices as a slice; None for other indices.

    Example:
        >>> as_slice(torch.tensor([2, 3, 4])), as_slice(torch.tensor([2, 4]))
        (slice(2, 5, None), None)
    """
    start, stop = int(rows[0]), int(rows[0]) + rows.numel()
    return slice(start, stop) if torch.equal(rows, torch.arange(start, stop, device="cpu")) else None


@dataclass(frozen=True, eq=False)
class HeadSlice:
    """The rows of one parameter that belong to each head.

    The parameter is looked up on its module at every use, because wrappers may replace it.

    Args:
        module: the module that owns the parameter.
        attribute: the parameter's name on that module, such as `weight` or `in_proj_weight`.
        parameter_name: its dotted name in the model, for messages.
        rows: int64 [M, R]; `rows[i]` are the output features of head i, in order.
        axis: the dimension of the parameter that counts output features (0 for `nn.Linear`, 1 for `Conv1D`). In einsum
            notation, the dimension that counts heads.
        along: the dimension that counts the features of a head, in einsum notation; None for the last of the others.

    Raises:
        HeadLayoutError: `rows` is not two-dimensional, or a row does not exist or is listed twice.
    """

    module: nn.Module
    attribute: str
    parameter_name: str
    rows: Tensor
    axis: int = 0
    along: int | None = None
    _strides: tuple[int, int, int] | None = field(init=False, repr=False)  # offset, head stride, feature stride
    _copies: dict[torch.device, Tensor] = field(init=False, repr=False, default_factory=dict)  # rows on devices

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.dtype != torch.int64:
            raise HeadLayoutError(
                f"{self.parameter_name}: expected rows as int64 [heads, features], got {self.rows.dtype} "
                f"{list(self.rows.shape)}"
            )
        size = self.parameter().shape[self.axis]
        if self.rows.numel() == 0:
            raise HeadLayoutError(f"{self.parameter_name}: expected rows for each head, got {list(self.rows.shape)}")
        first, last = int(self.rows.min()), int(self.rows.max())
        if first < 0 or last >= size:
            raise HeadLayoutError(
                f"{self.parameter_name}: expected rows from 0 to {size - 1}, got {first} to {last}; check the number "
                "of heads"
            )
        if self.rows.unique().numel() != self.rows.numel():
            raise HeadLayoutError(f"{self.parameter_name}: a row is listed twice; each row must belong to one head")
        object.__setattr__(self, "_strides", _regular_strides(self.rows))

    @property
    def num_heads(self) -> int:
        return self.rows.shape[0]

    @property
    def dim(self) -> int:
        """Number of weights per head."""
        parameter = self.parameter()
        return self.rows.shape[1] * parameter.numel() // parameter.shape[self.axis]

    @property
    def features(self) -> int:
        """Number of output features of the parameter, of all heads and all parts."""
        return self.parameter().shape[self.axis]

    @property
    def inputs(self) -> int:
        """Number of input features of a matrix."""
        return self.parameter().shape[1 - self.axis]

    @property
    def is_whole(self) -> bool:
        """Whether the heads follow each other without gaps and cover the whole parameter."""
        features = self.parameter().shape[self.axis]
        return self.axis == 0 and self._strides == (0, self.rows.shape[1], 1) and self.rows.numel() == features

    @property
    def feature_axis(self) -> int | None:
        """The axis of a weight in einsum notation that counts the features of a head.

        None for any other weight, in which one axis counts the features of all heads.
        """
        if self.rows.shape[1] != 1 or self.parameter().ndim != 3 or isinstance(self.module, nn.modules.conv._ConvNd):
            return None
        return self.along if self.along is not None else 1 if self.axis == 2 else 2

    @property
    def width(self) -> int:
        """Number of output features per head."""
        return self.rows.shape[1] if self.feature_axis is None else self.parameter().shape[self.feature_axis]

    def parameter(self) -> Tensor:
        """Look up the current parameter on its module.

        Raises:
            UnsupportedWeights: the module has no tensor of that name any more.
        """
        parameter = getattr(self.module, self.attribute, None)
        if not isinstance(parameter, Tensor):
            raise UnsupportedWeights(
                f"{self.parameter_name}: no tensor of that name; was the layer replaced after find_heads?"
            )
        return parameter

    def view(self, tensor: Tensor) -> Tensor | None:
        """View `tensor`, shaped as the parameter, as heads [M, R, ...]; None if the rows have no regular stride."""
        if self._strides is None:
            return None
        offset, head_stride, feature_stride = self._strides
        features = tensor.movedim(self.axis, 0)  # [features, ...]
        unit, rest = features.stride(0), features.shape[1:]
        return features.as_strided(
            (*self.rows.shape, *rest),
            (head_stride * unit, feature_stride * unit, *features.stride()[1:]),
            features.storage_offset() + offset * unit,
        )

    def take(self, tensor: Tensor) -> Tensor:
        """Return the heads of `tensor` (shaped as the parameter) as [M, D], row-major in a head; a view if possible."""
        heads = self.view(tensor)
        if heads is None:
            features = tensor.movedim(self.axis, 0)
            heads = features[self._rows_on(tensor.device)]  # [M, R, ...]
        return heads.flatten(1)

    def put(self, tensor: Tensor, heads: Tensor) -> None:
        """Write `heads` [M, D] into `tensor` (shaped as the parameter); rows outside all heads stay unchanged."""
        features = tensor.movedim(self.axis, 0)
        shaped = heads.reshape(*self.rows.shape, *features.shape[1:]).to(tensor.dtype)
        target = self.view(tensor)
        if target is None:
            features[self._rows_on(tensor.device)] = shaped
        else:
            target.copy_(shaped)

    def _rows_on(self, device: torch.device) -> Tensor:
        """Copy the rows to a device, once: a copy waits for all work of a GPU."""
        if device.type == "cpu":
            return self.rows
        if device not in self._copies:
            self._copies[device] = self.rows.to(device)
        return self._copies[device]


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """M heads that repel each other: one projection of one attention layer, or all of its projections joined.

    Other particles are grouped alike: experts, members of an ensemble, adapters (`group_modules`, `group_stacked`).

    Args:
        name: the attention module's dotted name, then the part; unique in the model.
        layer: index of the attention layer in its stack, from 0.
        part: "q", "k" or "v"; joined groups have several letters, such as "qkv". Any name outside attention.
        where: "encoder", "decoder" or "cross"; "-" outside attention.
        stack: dotted name of the list of layers that `layer` counts in.
        family: name of the matching row of the family table, "inferred" or "by hand".
        slices: one per parameter, all with the same number of heads; with `modules` > 1 see there.
        serves: for q heads that share key-value heads, the kv head of each q head; else None.
        proof: where the rows come from: "proved" (traced by autograd on an example), "table" (a class that the family
            table lists), "given" (named by the caller) or "guess" (names and shapes only). `repel` rejects a guess.
        modules: number of modules that the heads lie in. If above 1, slices are grouped by parameter name: one slice
            per module, then those of the next name. The heads of such a run follow each other.
        has_norm: whether the trace of an example found a norm between the projection and attention; for q and k, a norm
            on either of them. False if no example was given.

    Raises:
        HeadLayoutError: `proof` is unknown, or the slices differ in their number of heads.
    """

    name: str
    layer: int
    part: str
    where: str
    stack: str
    family: str
    slices: tuple[HeadSlice, ...]
    serves: tuple[int, ...] | None = None
    proof: str = "given"
    modules: int = 1
    has_norm: bool = False

    def __post_init__(self) -> None:
        if self.proof not in PROOFS:
            raise HeadLayoutError(f"{self.name}: proof={self.proof!r} is unknown; use one of {', '.join(PROOFS)}")
        if len({s.num_heads for s in self.slices}) != 1:
            counts = ", ".join(f"{s.parameter_name}: {s.num_heads}" for s in self.slices)
            raise HeadLayoutError(f"{self.name}: expected the same number of heads in all slices, got {counts}")
        if len(self.slices) % self.modules:
            raise HeadLayoutError(
                f"{self.name}: expected one slice per parameter and module, got {len(self.slices)} slices for "
                f"{self.modules} modules"
            )

    def __repr__(self) -> str:
        return (
            f"HeadGroup({self.name!r}, layer={self.layer}, part={self.part!r}, where={self.where!r}, "
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, proof={self.proof!r})"
        )

    @property
    def num_heads(self) -> int:
        return self.slices[0].num_heads * self.modules

    @property
    def head_dim(self) -> int:
        """Number of output features per head, d_head."""
        return self.slices[0].width

    @property
    def dim(self) -> int:
        """Number of weights per head, over all slices."""
        return sum(run[0].dim for run in self.runs())

    @property
    def is_attention(self) -> bool:
        """Whether these are attention heads, not experts, members of an ensemble or other particles."""
        return self.where != "-"

    def runs(self) -> list[tuple[HeadSlice, ...]]:
        """Slices that together hold one parameter of all heads: single slices, or one slice per module."""
        return [self.slices[i : i + self.modules] for i in range(0, len(self.slices), self.modules)]

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the current parameter of each slice."""
        return tuple(s.parameter() for s in self.slices)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Copy the current weights of the heads to [M, D]; the slices of a head are concatenated in order.

        Sharded weights are gathered, so every rank must call this.
        """
        heads = [[s.take(whole_tensor(s.parameter().detach())) for s in run] for run in self.runs()]
        return join([stack_heads(parts) for parts in heads]).clone()


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate [M, D_1], [M, D_2], ... to [M, D_1 + D_2 + ...]; a single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=-1)


def stack_heads(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate [M_1, D], [M_2, D], ... to [M_1 + M_2 + ..., D]; a single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=0)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded over ranks."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def _regular_strides(rows: Tensor) -> tuple[int, int, int] | None:
    """Find (offset, head stride, feature stride) with rows[i, k] = offset + i * head stride + k * feature stride."""
    heads, features = rows.shape
    offset = int(rows[0, 0])
    head_stride = int(rows[1, 0]) - offset if heads > 1 else features
    feature_stride = int(rows[0, 1]) - offset if features > 1 else 1
    if head_stride <= 0 or feature_stride <= 0:
        return None
    grid = (
        torch.arange(heads, device="cpu")[:, None] * head_stride
        + torch.arange(features, device="cpu")[None, :] * feature_stride
    )
    return (offset, head_stride, feature_stride) if torch.equal(rows, grid + offset) else None

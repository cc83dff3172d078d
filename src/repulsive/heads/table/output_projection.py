"""Find the output projection of an attention layer: the matrix applied to its concatenated heads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from repulsive.heads.table.known_families import known_families
from repulsive.heads.table.match import follow, is_conv1d

# Usual names of the output projection, for classes without `out` in the family table. The first that fits is taken.
USUAL_NAMES = (
    "out_proj",
    "o_proj",
    "proj",
    "c_proj",
    "to_out",
    "to_out.0",
    "out",
    "o",
    "wo",
    "Wo",
    "w_o",
    "W_o",
    "dense",
    "../output.dense",
    "../dense",
    "output.dense",
    "out_lin",
    "linear_out",
    "output_layer",
    "final_linear",
    "fc_out",
    "fc",
    "attention_out",
    "output_proj",
    "projection_layer",
    "projection_out",
    "proj_out",
    "projection",
    "attention_output",
    "output",
    "../output",
    "post.linear",
)


def output_projection(
    modules: Mapping[str, nn.Module], name: str, family: str, heads: int, head_dim: int, out: str | None = None
) -> tuple[str, nn.Module, int] | None:
    """Find the output projection of an attention layer.

    Args:
        modules: all modules of the model by dotted name.
        name: dotted name of the attention module.
        family: name of the family table row that matched the module.
        heads: number of query heads.
        head_dim: width of a head's values; 0 if unknown.
        out: dotted name of the projection, if the caller knows it.

    Returns:
        The projection's dotted name, module and number of input features; None if no projection has the heads' width.
    """
    attention = modules[name]
    table = [f.out for f in known_families() if f.name == family and f.out]
    candidates = [out] if out is not None else [_absolute(name, path) for path in (*table, *USUAL_NAMES)]
    for path in candidates:
        projection = modules.get(path) or follow(attention, path.removeprefix(f"{name}."))
        width = input_features(projection)
        if isinstance(projection, nn.Module) and width and width == heads * (head_dim or width // heads):
            return path, projection, width
    return None


def output_parameter(
    modules: Mapping[str, nn.Module], name: str, family: str, heads: int, head_dim: int, out: str | None = None
) -> tuple[str, int] | None:
    """Find the output weight of an attention layer in einsum notation, a parameter [heads, features, outputs].

    Args:
        modules: all modules of the model by dotted name.
        name: dotted name of the attention module.
        family: name of the family table row that matched the module.
        heads: number of query heads.
        head_dim: width of a head's values.
        out: dotted name of the parameter, if the caller knows it.

    Returns:
        The parameter's dotted name, and its axis that counts heads; the next axis counts the features of a head.
    """
    table = [_absolute(name, f.out) for f in known_families() if f.name == family and f.out]
    for path in table if out is None else [out]:
        owner, _, attribute = path.rpartition(".")
        axis = heads_axis(modules[name]._parameters.get(attribute), heads, head_dim) if owner == name else None
        if axis is not None:
            return path, axis
    return None


def heads_axis(weight: Tensor | None, heads: int, head_dim: int) -> int | None:
    """Find the axis of an output weight that counts heads and is followed by their features; None if there is none."""
    if weight is None or weight.ndim != 3:
        return None
    return next((axis for axis in (0, 1) if tuple(weight.shape[axis : axis + 2]) == (heads, head_dim)), None)


def _absolute(name: str, path: str) -> str:
    parent = name.rpartition(".")[0] if path.startswith("../") else name
    return ".".join(part for part in (parent, path.removeprefix("../")) if part)


def input_features(projection: object) -> int | None:
    """Return the number of input features of a projection; None if the object is not a projection."""
    declared = getattr(projection, "in_features", None)
    weight = getattr(projection, "weight", None)
    if isinstance(declared, int):
        return declared
    if isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0 if is_conv1d(projection) else 1]
    return None

"""The output projection of an attention layer: the matrix that takes its heads side by side."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from repulsive.heads.table.families import FAMILIES
from repulsive.heads.table.match import follow

# Output projections of classes that the family table leaves open; the first that is as wide as the heads is taken.
USUAL = (
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
        name: of the attention module.
        family: the line of the family table that matched it.
        heads: query heads.
        head_dim: width of a head's values; 0 where it is not known.
        out: dotted name of the projection, where the caller knows it.

    Returns:
        Its dotted name, the module and how many features it takes; None where there is none as wide as the heads.
    """
    attention = modules[name]
    table = [f.out for f in FAMILIES if f.name == family and f.out]
    tried = [out] if out is not None else [_absolute(name, path) for path in (*table, *USUAL)]
    for path in tried:
        projection = modules.get(path) or follow(attention, path.removeprefix(f"{name}."))
        width = _width(projection)
        if isinstance(projection, nn.Module) and width and width == heads * (head_dim or width // heads):
            return path, projection, width
    return None


def _absolute(name: str, path: str) -> str:
    parent = name.rpartition(".")[0] if path.startswith("../") else name
    return ".".join(part for part in (parent, path.removeprefix("../")) if part)


def _width(projection: object) -> int | None:
    """How many features a projection takes, or None if it is none."""
    taken = getattr(projection, "in_features", None)
    weight = getattr(projection, "weight", None)
    if isinstance(taken, int):
        return taken
    if isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0 if type(projection).__name__ == "Conv1D" else 1]
    return None

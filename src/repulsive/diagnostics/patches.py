"""Find which tokens of a vision transformer are patches of the picture, and which are class or register tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from repulsive.errors import DataError

# Parameters that vision transformers of transformers and timm put before the patches -> name of their tokens.
_SPECIAL = {
    "cls_token": "class",
    "class_token": "class",
    "class_embedding": "class",
    "dist_token": "distillation",
    "distillation_token": "distillation",
    "reg_token": "register",
    "register_tokens": "register",
}


@dataclass(frozen=True)
class PatchLayout:
    """Positions of the tokens of a vision transformer: special tokens first, then patches row by row.

    Args:
        rows: number of rows of patches.
        columns: number of columns of patches.
        special: names of the class and register tokens, in order.
        patch: height and width of a patch in pixels.
    """

    rows: int
    columns: int
    special: tuple[str, ...] = ()
    patch: tuple[int, int] = (1, 1)

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Number of tokens: special tokens and patches."""
        return len(self.special) + self.patches

    def on_picture(self, weights: Tensor) -> Tensor:
        """Drop the special tokens and arrange the patches as in the picture: [..., T] -> [..., rows, columns]."""
        return weights[..., len(self.special) :].unflatten(-1, (self.rows, self.columns))

    def default_query(self, weights: Tensor) -> Tensor:
        """Return the attention of the class token, or the mean over patches without one: [..., T, S] -> [..., S]."""
        return weights[..., 0, :] if self.special[:1] == ("class",) else weights[..., len(self.special) :, :].mean(-2)


def patch_layout(model: nn.Module, height: int, width: int) -> PatchLayout:
    """Derive the layout of the tokens from the parameters of a model.

    Args:
        model: a vision transformer of transformers or timm.
        height: height of its inputs in pixels.
        width: width of its inputs in pixels.

    Raises:
        DataError: the model does not cut pictures into patches by a convolution.
    """
    down, across = patch_embedding(model).stride
    if height < down or width < across:
        raise DataError(f"pictures of {height} x {width} pixels are smaller than a patch of {down} x {across}")
    return PatchLayout(height // int(down), width // int(across), _special_tokens(model), (int(down), int(across)))


def patch_embedding(model: nn.Module) -> nn.Conv2d:
    """Return the convolution that cuts pictures into patches.

    Raises:
        DataError: the first convolution of the model does not cut patches, or there is none.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.kernel_size != first.stride or max(first.stride) < 2:
        raise DataError(f"{type(model).__name__} does not cut pictures into patches; --images needs a ViT")
    return first


def check_layout(layout: PatchLayout, attention: Sequence[Tensor], name: str) -> None:
    """Raise an error if no layer attends between all tokens of the layout.

    Args:
        layout: the layout.
        attention: attention weights [B, M, T, S] of each layer.
        name: name of the model class.

    Raises:
        DataError: no layer has the shape that the layout implies, as in models that attend within windows (Swin).
    """
    shape = (layout.tokens, layout.tokens)
    if any(weights.shape[-2:] == shape for weights in attention):
        return
    sizes = sorted({int(weights.shape[-1]) for weights in attention})
    raise DataError(
        f"{name}: expected attention between {layout.rows} x {layout.columns} patches and {len(layout.special)} class "
        f"or register tokens ({layout.tokens} tokens), found layers of {', '.join(map(str, sizes)) or 'no'} tokens; "
        "--images needs a ViT that attends between all patches"
    )


def _special_tokens(model: nn.Module) -> tuple[str, ...]:
    names: list[str] = []
    width = patch_embedding(model).out_channels
    for path, parameter in model.named_parameters():
        kind = _SPECIAL.get(path.rpartition(".")[2])
        if kind is not None:
            count = parameter.numel() // width
            names += [kind] if count == 1 and kind != "register" else [f"{kind} {index}" for index in range(count)]
    order = {"class": 0, "distillation": 1, "register": 2}
    return tuple(sorted(names, key=lambda name: order[name.split()[0]]))

"""An attention class with q, k and v of each head side by side."""

from torch import Tensor, nn


class Blend(nn.Module):
    def __init__(self, width: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.blend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.blend(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)  # [B, M, T, d] each
        return self.merge(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

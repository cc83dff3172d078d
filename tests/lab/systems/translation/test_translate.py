"""Translating in another precision, and in batches of another size."""

import dataclasses

import torch

from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.lab.systems.translation.translate import Search, translate
from repulsive.lab.text.tokens import Ragged


def test_half_precision_finds_nearly_the_same():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(40, width=32, feed_forward=32)).eval()
    lengths = torch.randint(2, 9, (24,))
    pieces = torch.randint(4, 40, (int(lengths.sum()),), dtype=torch.int32)
    source = Ragged(pieces, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    search = Search(beam=4, longest=12, at_once=64)
    whole = [best[0] for best in translate(model, source, search)]
    half = [best[0] for best in translate(model, source, dataclasses.replace(search, precision="bf16"))]
    assert model.embedding.weight.dtype == torch.float32
    assert all(abs(a.score - b.score) < 0.05 for a, b in zip(whole, half, strict=True))
    assert any(a.score != b.score for a, b in zip(whole, half, strict=True))
    for a, b in zip(whole, translate(model, source, dataclasses.replace(search, at_once=4096)), strict=True):
        assert a.tokens == b[0].tokens

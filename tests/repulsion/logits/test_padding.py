"""Find masks in the arguments of a call: by name, by position, and inside objects."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from repulsive.lab.systems.translation.model import Mask
from repulsive.repulsion.logits.padding import masks_in, valid_tokens

MASK = torch.tensor([[True, True, False], [True, False, False]])


class Layer(nn.Module):
    def forward(self, x: Tensor, mask: object = None, *others: Tensor) -> Tensor:
        return x


def test_masks_are_found_by_position_and_by_name():
    x = torch.zeros(2, 3, 4)
    assert masks_in(Layer(), (x, MASK), {})["mask"] is MASK
    assert masks_in(Layer(), (x,), {"mask": MASK})["mask"] is MASK
    assert masks_in(Layer(), (x, MASK, x, x), {"others_too": x}) == {"mask": MASK}
    assert masks_in(Layer(), (x,), {}) == {}


def test_an_object_holds_its_mask_as_the_attribute_attention_mask():
    x = torch.zeros(2, 3, 4)
    assert masks_in(Layer(), (x, SimpleNamespace(attention_mask=MASK)), {})["mask"] is MASK
    for other in (SimpleNamespace(real=MASK), SimpleNamespace(attention_mask=None), 1.0, None):
        assert masks_in(Layer(), (x, other), {}) == {}


def test_the_translation_model_leaves_out_its_padding():
    masks = masks_in(Layer(), (torch.zeros(2, 3, 4), Mask(MASK[:, None, None, :])), {})
    valid = valid_tokens(masks, (2, 3), "encoder", "k")
    assert valid is not None and torch.equal(valid, MASK)

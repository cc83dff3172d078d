"""A small BERT whose heads matter, and two batches for it."""

import pytest
import torch

from tests.heads.zoo import SMALL, ids

transformers = pytest.importorskip("transformers")


def masked_lm(**changes):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, **changes}))
    with torch.no_grad():  # with initial weights, heads have little effect
        for name, parameter in model.named_parameters():
            if "attention" in name and parameter.ndim == 2:
                parameter.mul_(15)
    return model


def text():
    """Two batches; the second has padding."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return [{"input_ids": ids()}, {"input_ids": ids().flip(1), "attention_mask": mask}]


def grids_of(found):
    """Number of cosine matrices that the page draws."""
    pairs = [d.num_heads > 1 for each in found.diversity.values() for d in each]
    return sum(pairs) + sum(c.similarity.num_heads > 1 for c in found.circuits.logits + found.circuits.ov)

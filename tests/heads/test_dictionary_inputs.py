"""Models that take one dictionary and write into it, as those of sentence-transformers; parameters of one storage."""

from collections import UserDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive import Heads, find_heads, repel, verify_heads
from repulsive.errors import NoHeadsFound
from repulsive.heads.call_arguments import call_arguments


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None].bool())
        return x + self.o_proj(out.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Reads some entries of the dictionary and adds others, also tensors that need gradients."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.layers = nn.ModuleList(Attention() for _ in range(2 * attends))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        if "token_embeddings" in features:
            raise ValueError("results of an earlier pass are in the inputs")
        x = self.embedding(features["input_ids"])
        for layer in self.layers:
            x = layer(x, features["attention_mask"])
        features["token_embeddings"] = x
        return features


class Mean(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None]
        features["sentence_embedding"] = (features["token_embeddings"] * mask).sum(1) / mask.sum(1)
        return features


class Sentences(nn.Sequential):
    """A sequence of modules, called with one dictionary and options by keyword."""

    def forward(self, input: dict[str, Tensor], **options: str) -> dict[str, Tensor]:
        assert not options
        for module in self:
            input = module(input)
        return input


def build(attends: bool = True) -> tuple[Sentences, dict[str, Tensor]]:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    return Sentences(Encoder(attends), Mean()), {"input_ids": torch.randint(20, (3, 5)), "attention_mask": mask}


@pytest.mark.parametrize("form", ["dictionary", "user dictionary", "tuple", "keyword"])
def test_heads_of_a_model_that_takes_one_dictionary_are_proved(form: str) -> None:
    model, features = build()
    inputs = {
        "dictionary": features,
        "user dictionary": UserDict(features),
        "tuple": (features,),
        "keyword": {"input": features},
    }[form]
    groups = find_heads(model, inputs)
    assert len(groups) == 6 and {group.proof for group in groups} == {"proved"}
    assert all(report.status == "verified" for report in verify_heads(model, inputs))
    heads = Heads(model, inputs)
    attention = heads.attention(inputs)
    assert [a.shape for a in attention] == [(3, 4, 5, 5)] * 2 and torch.all(attention[0][1, ..., 3:] == 0)
    with heads.ablated([(0, 1)]):
        heads.outputs(inputs)
    assert set(features) == {"input_ids", "attention_mask"}


def test_repel_on_the_whole_model_changes_gradients_as_on_its_encoder() -> None:
    gradients = []
    for has_repulsion, part in ((True, slice(None)), (True, 0), (False, 0)):
        model, features = build()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        handle = repel(model[part], optimizer, example_inputs=features) if has_repulsion else None
        model(dict(features))["sentence_embedding"].square().sum().backward()
        optimizer.step()
        gradients.append(model[0].layers[0].k_proj.weight.grad.clone())
        assert handle is None or handle.report()
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])


def test_a_model_without_attention_is_refused() -> None:
    model, features = build(attends=False)
    with pytest.raises(NoHeadsFound):
        find_heads(model, features)
    with pytest.raises(NoHeadsFound):
        repel(model, torch.optim.AdamW(model.parameters(), 1e-2))


class Named(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, **more: float) -> Tensor:
        return x * scale


def test_a_mapping_is_one_argument_only_if_the_required_name_is_missing() -> None:
    for inputs in ({"x": 1}, {"x": 1, "scale": 2.0}, {"x": 1, "other": 3.0}):
        assert call_arguments(Named(), inputs) == ((), inputs)
    assert call_arguments(Named(), {"ids": 1}) == (({"ids": 1},), {})
    assert call_arguments(Named(), {"scale": 2.0}) == ((), {"scale": 2.0})  # torch reports the missing x
    assert call_arguments(nn.Bilinear(2, 2, 2), {"ids": 1}) == ((), {"ids": 1})


@pytest.mark.parametrize("axis", [0, 1])
def test_parameters_that_share_a_storage_are_distinguished(axis: int) -> None:
    model, features = build()
    for layer in model[0].layers:
        whole = torch.randn(96, 32) if axis == 0 else torch.randn(32, 96)
        for name, part in zip("qkv", whole.chunk(3, axis), strict=True):
            getattr(layer, f"{name}_proj").weight = nn.Parameter(part)
        assert layer.q_proj.weight.untyped_storage().data_ptr() == layer.v_proj.weight.untyped_storage().data_ptr()
    assert [report.status for report in verify_heads(model, features)] == ["verified"] * 6
    assert {group.proof for group in find_heads(model, features)} == {"proved"}

"""Similarity of logits and OV circuits in layers with norms, adapters, latent attention, or tokens first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.errors import HeadLayoutError
from repulsive.heads import find_heads
from tests.diagnostics.circuit_cases import MASK, TEXT, shaken
from tests.heads.zoo import build

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["olmo2, sdpa", "timm"])
def test_a_norm_after_the_projection_counts(name):
    model, inputs = build(name)
    before = circuit_similarity(shaken(model), [_double(inputs)]).logits[0].cosine
    attention = model.layers[0].self_attn if name.startswith("olmo") else model[0]
    with torch.no_grad():
        attention.q_norm.weight[:3] *= -5
    after = circuit_similarity(model, [_double(inputs)]).logits[0].cosine
    assert float((after - before).abs().max()) > 0.01


def _double(inputs: Any) -> Any:
    return inputs.double() if isinstance(inputs, Tensor) else inputs


class NormedAfter(nn.Module):
    """A query norm whose input is scaled queries, not the result of the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))
        self.q_norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(2 * self.q_proj(x)), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.view(*x.shape[:2], 2, 4).transpose(1, 2) for part in (q, k, v))
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TokensFirst(nn.Module):
    """Projects [T, B, D], as in fairseq and Longformer; `padding` adds tokens to those of the inputs."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.num_heads, self.padding = 2, padding
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = nn.functional.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, self.padding))  # [T, B, D]
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).permute(1, 2, 0, 3) for layer in layers)
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("version", ["V2", "V3"])
def test_latent_attention_is_compared_without_its_rotary_features(version):
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16,
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 3, "first_k_dense_replace": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"Deepseek{version}Config")(**sizes)
    model = getattr(transformers, f"Deepseek{version}Model")(config).double().eval()
    result = circuit_similarity(model, [TEXT], groups=find_heads(model, TEXT))
    assert not result.left_out
    attention, seen = model.layers[0].self_attn, {}
    for name in ("q_b_proj", "kv_b_proj"):
        getattr(attention, name).register_forward_hook(lambda _m, _a, out, name=name: seen.update({name: out}))
    model(**TEXT)
    q = seen["q_b_proj"].view(2, 7, 4, 6)[..., :4]
    k = seen["kv_b_proj"].view(2, 7, 4, 7)[..., :4]
    keys = torch.cat([sequence[real] - sequence[real].mean(0) for sequence, real in zip(k, MASK.bool(), strict=True)])
    logits = torch.einsum("xmd,ymd->mxy", q[MASK.bool()], keys).flatten(1)
    expected = torch.nn.functional.normalize(logits, dim=1)
    torch.testing.assert_close(result.logits[0].cosine, (expected @ expected.T).detach(), rtol=1e-6, atol=1e-8)


def test_tokens_may_come_first():
    model, x, mask = TokensFirst(), torch.randn(2, 5, 8), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    found = circuit_similarity(model, [{"x": x, "attention_mask": mask}]).logits[0]
    keys = model.k_proj(x).unflatten(-1, (2, 4)).detach()
    q = model.q_proj(x).unflatten(-1, (2, 4)).detach()[mask.bool()].double()  # [8, 2, 4]
    k = torch.cat([row[real.bool()] - row[real.bool()].mean(0) for row, real in zip(keys, mask, strict=True)]).double()
    f = torch.einsum("xid,yid->ixy", q, k).flatten(1)
    torch.testing.assert_close(found.cosine[0, 1], torch.cosine_similarity(f[0], f[1], dim=0), rtol=1e-5, atol=1e-5)
    with pytest.raises(HeadLayoutError, match="projects 7 tokens, but the mask of the inputs has 5"):
        circuit_similarity(TokensFirst(padding=2), [{"x": x, "attention_mask": mask}])


def test_layers_that_cannot_be_recorded_have_a_reason():
    x = torch.randn(2, 5, 8)
    with pytest.raises(HeadLayoutError, match="q norm does not take the result"):
        circuit_similarity(NormedAfter(), [x])
    model, inputs = build("additive")
    with pytest.raises(HeadLayoutError, match="has no queries and keys"):
        circuit_similarity(model, [inputs])
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    both = nn.ModuleDict({"read": attention, "idle": nn.MultiheadAttention(8, 2, batch_first=True)})
    both.forward = lambda given: both["read"](given, given, given)[0]
    found = circuit_similarity(both, [x])
    assert [s.name for s in found.logits] == ["read"] and "never called" in found.left_out["idle"]


def test_adapters_count():
    peft = pytest.importorskip("peft")
    model = build("bert, sdpa")[0]
    plain_model = circuit_similarity(model, [TEXT])
    config = peft.LoraConfig(target_modules=["query", "attention.output.dense"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    before = circuit_similarity(adapted, [TEXT])
    after = circuit_similarity(adapted.merge_and_unload(), [TEXT])
    for circuit in ("logits", "ov"):
        a, b, c = (getattr(each, circuit)[0].cosine for each in (plain_model, before, after))
        torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-4)
        assert float((a - b).abs().max()) > 1e-3

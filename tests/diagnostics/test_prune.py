"""Pruned models equal ablated ones, are smaller, and can be saved and loaded."""

import json
import math
from dataclasses import replace

import pytest
import torch

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.prune import PRUNED, load_pruned, prune, save_pruned
from repulsive.diagnostics.redundancy import ablate
from repulsive.errors import CheckpointError, HeadLayoutError, SelectionError
from repulsive.heads import find_heads
from repulsive.lab.systems.classification.model import PairClassifier, SelfAttentiveConfig, SentenceClassifier
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from tests.heads.zoo import build, ids

LIKE_BERT = [
    "bert",
    "bert with cross-attention",
    "roberta",
    "electra",
    "albert",
    "distilbert",
    "vit",
    "bart",
    "marian",
    "gpt2 with cross-attention",
]

ONE_STACK = ("vit", "distilbert")


@torch.no_grad()
def run(model, inputs):
    with evaluating(model):
        result = call(model, inputs)
    return result if isinstance(result, torch.Tensor) else result[0]


def lab_model(kind):
    torch.manual_seed(0)
    if kind == "transformer":
        return Transformer(TransformerConfig.tiny(40, width=32)), (ids(7) % 40, ids(5) % 40)
    if kind == "pairs":
        return PairClassifier(SelfAttentiveConfig.tiny(40)), (ids(7) % 40, ids(5) % 40)
    return SentenceClassifier(SelfAttentiveConfig.tiny(40, own_hidden=kind == "own")), ids(7) % 40


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", LIKE_BERT)
def test_a_pruned_transformers_model_equals_the_ablated_one(name, kind):
    model, inputs = build(f"{name}, {kind}")
    last = 0 if name == "albert" else 1
    heads = [(0, 1), (last, 0), (last, 3)]
    with ablate(model, heads):
        wanted = run(model, inputs)
    before = parameter_count(model)
    smaller = prune(model, heads)
    torch.testing.assert_close(run(smaller, inputs), wanted, atol=1e-5, rtol=1e-4)
    removed = len(set(heads)) * 8 * (4 * 32 + 3)  # rows and biases of q, k, v, columns of the output projection
    assert parameter_count(smaller) == before - removed and parameter_count(model) == before
    counts = [g.num_heads for g in find_heads(smaller)]
    assert counts[:3] == ([1] * 3 if name == "albert" else [3] * 3)


@pytest.mark.parametrize("kind", ["transformer", "pairs", "shared", "own"])
def test_lab_models(kind):
    model, inputs = lab_model(kind)
    heads = [(0, 1), (3, 0), (3, 2)] if kind == "transformer" else [(0, 1), (0, 3)]
    with ablate(model, heads):
        wanted = run(model, inputs)
    assert not torch.allclose(wanted, run(model, inputs), atol=1e-4)
    smaller = prune(model, heads)
    torch.testing.assert_close(run(smaller, inputs), wanted, atol=1e-5, rtol=1e-4)
    again = load_pruned(lab_model(kind)[0], smaller.state_dict())
    assert torch.equal(run(again, inputs), run(smaller, inputs))
    if kind != "transformer":  # a model built with fewer heads can load the weights
        built = type(model)(smaller.encoder.config)
        built.load_state_dict(smaller.state_dict())
        assert smaller.encoder.config == replace(model.encoder.config, heads=2)
        assert torch.equal(run(built, inputs), run(smaller, inputs))


def test_a_pruned_model_trains():
    model, inputs = lab_model("transformer")
    smaller = prune(model, [(0, 0)])
    smaller(*inputs).square().mean().backward()
    weight = smaller.encoder.layers[0].self_attention.q_proj.weight
    assert weight.grad.shape == weight.shape == (24, 32)


def test_a_pruned_bert_with_tied_weights_can_be_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 64}
    config = transformers.BertConfig(num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    smaller = prune(transformers.BertForMaskedLM(config), [(0, 2), (1, 0), (1, 1)])
    smaller.save_pretrained(tmp_path)
    saved = transformers.AutoConfig.from_pretrained(tmp_path)
    fresh = transformers.BertForMaskedLM(saved)
    again = load_pruned(fresh, tmp_path)
    inputs = {"input_ids": ids()}
    assert torch.equal(run(again, inputs), run(smaller, inputs))
    assert again.cls.predictions.decoder.weight.data_ptr() == again.bert.embeddings.word_embeddings.weight.data_ptr()


@pytest.mark.parametrize("name", ["vit", "marian", "bart", "gpt2 with cross-attention", "distilbert"])
def test_a_saved_model_can_be_loaded(name, tmp_path):
    model, inputs = build(f"{name}, sdpa")
    smaller = prune(model, [(0, 1), (1, 3)])
    folder = save_pruned(smaller, tmp_path / "deep" / "folder")
    again = load_pruned(type(model)(type(model.config).from_pretrained(folder)), folder)
    assert torch.equal(run(again, inputs), run(smaller, inputs))
    assert list(json.loads((folder / PRUNED).read_text()).values())[:3] == [3, 3, 4][: 2 if name in ONE_STACK else 3]
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    whole = save_pruned(model, tmp_path / "whole")
    assert size < sum(p.stat().st_size for p in whole.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["transformer", "pairs"])
def test_lab_models_can_be_saved_and_loaded(kind, tmp_path):
    model, inputs = lab_model(kind)
    smaller = prune(model, [(0, 1), (0, 3)])
    again = load_pruned(lab_model(kind)[0], save_pruned(smaller, tmp_path / "smaller"))
    assert torch.equal(run(again, inputs), run(smaller, inputs))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another folder"):
        save_pruned(smaller, tmp_path / "file")


def test_a_pruned_gpt2_generates_the_same_tokens():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)).eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with ablate(model, [(0, 1), (1, 2)]):
        wanted = model.generate(ids(), **settings)
    assert torch.equal(prune(model, [(0, 1), (1, 2)]).generate(ids(), **settings), wanted)


GROUPED_QUERY = ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma", "Granite"]


def grouped_query_model(name, heads=6, kv_heads=2):
    """A small causal language model whose query heads share key-value heads."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        shared_expert_intermediate_size=16,
        num_local_experts=2,
        num_experts=2,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("removed", [[2], [0, 1, 2], [0, 3], [0, 1, 3], [1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize("name", GROUPED_QUERY)
def test_heads_that_share_keys_and_values(name, removed):
    """Remove one head of a group, a whole group, one of each group, unequal numbers, all but one."""
    model, heads = grouped_query_model(name), [(1, head) for head in removed]
    with ablate(model, heads):
        wanted = model(ids()).logits
    smaller = prune(model, heads)
    torch.testing.assert_close(smaller(ids()).logits, wanted, atol=1e-5, rtol=1e-4)
    counts = {(g.layer, g.part): g.num_heads for g in find_heads(smaller, ids(), parts="qkv")}  # traced
    left = [sum(head // 3 == group for head in range(6) if head not in removed) for group in range(2)]
    kv = sum(left) // math.gcd(*[count for count in left if count])
    assert counts == {(0, "q"): 6, (0, "k"): 2, (0, "v"): 2, (1, "q"): sum(left), (1, "k"): kv, (1, "v"): kv}


def test_a_pruned_llama_can_be_loaded_and_generates_the_same_tokens(tmp_path):
    model, heads = grouped_query_model("Llama"), [(0, 0), (0, 1), (0, 3), (1, 5)]
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with ablate(model, heads):
        wanted = model.generate(ids(), **settings)
    smaller = prune(model, heads)
    assert torch.equal(smaller.generate(ids(), **settings), wanted)
    save_pruned(smaller, tmp_path)
    again = load_pruned(type(model)(model.config), tmp_path).eval()
    assert torch.equal(again.generate(ids(), **settings), wanted)
    assert json.loads((tmp_path / PRUNED).read_text())["model.layers.0.self_attn"] == 3
    assert prune(again, [(0, 0)]).model.layers[0].self_attn.q_proj.out_features == 16  # it can be pruned again


def test_a_llama_without_sharing_loses_rows_of_q_k_and_v():
    model = grouped_query_model("Llama", kv_heads=6)
    smaller = prune(model, [(0, 1), (0, 4)])
    assert (
        parameter_count(model) - parameter_count(smaller) == 2 * 8 * 4 * 48
    )  # rows of q, k and v, columns of the output projection


def test_other_classes_are_refused_and_do_not_change():
    model, _ = build("t5")
    before = parameter_count(model)
    with pytest.raises(HeadLayoutError, match=r"T5Attention cannot be pruned.*use ablate"):
        prune(model, [(0, 0)])
    with pytest.raises(HeadLayoutError, match="MultiheadAttention cannot"):
        prune(build("torch packed")[0], [(0, 0)])
    with pytest.raises(HeadLayoutError, match="AdditiveAttention cannot"):
        prune(build("additive")[0], [(0, 0)])
    with pytest.raises(HeadLayoutError, match=r"Sequential has no attention class .*cannot be pruned"):
        prune(torch.nn.Sequential(torch.nn.Linear(4, 4)), [(0, 0)])
    assert parameter_count(model) == before


def test_wrong_heads_and_wrong_weights_are_refused(tmp_path):
    model, _ = build("bert, sdpa")
    with pytest.raises(SelectionError, match="would lose all of its 4 heads"):
        prune(model, [(1, h) for h in range(4)])
    with pytest.raises(SelectionError, match="no heads given"):
        prune(model, [])
    for place, message in (((0, 4), "no head 4"), ((0, 1.0), "no head 1.0"), (3, "3 is not a head")):
        with pytest.raises(SelectionError, match=message):
            prune(model, [place])
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_pruned(model, tmp_path)
    with pytest.raises(CheckpointError, match="they do not belong to a BertModel"):
        load_pruned(model, {})
    state = model.state_dict()
    with pytest.raises(CheckpointError, match="missing"):
        load_pruned(model, {key: value for key, value in state.items() if "LayerNorm" not in key})
    with pytest.raises(CheckpointError, match="unknown"):
        load_pruned(model, {**state, "other": torch.zeros(1)})


def test_adapters_must_be_merged_first():
    peft = pytest.importorskip("peft")
    model, inputs = build("bert, sdpa")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(HeadLayoutError, match="merge the adapters first"):
        prune(wrapped, [(0, 0)])
    merged = wrapped.merge_and_unload()
    with ablate(merged, [(0, 0)]):
        wanted = run(merged, inputs)
    torch.testing.assert_close(run(prune(merged, [(0, 0)]), inputs), wanted, atol=1e-5, rtol=1e-4)

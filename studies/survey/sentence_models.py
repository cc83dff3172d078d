"""Small models of sentence-transformers, each with an example, for `studies.survey.packages`.

Weights are random. Each Transformer is saved with a tokenizer of whole words and loaded by sentence-transformers, as a
user loads a model.
"""

from __future__ import annotations

import importlib
import tempfile
from functools import partial
from typing import Any

import torch
from studies.survey.package_models import Case, Cases

WORDS = [f"w{i}" for i in range(40)]
TEXTS = [" ".join(WORDS[:9]), " ".join(WORDS[9:15])]  # the second is padded
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[1], WORDS[20])]
SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1,
    "sep_token_id": 1, "num_labels": 1,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {"vocab_size": 48, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
DISTIL = {"vocab_size": 48, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {  # the prefix of the names of the config and model classes -> sizes
    "Bert": SIZES, "MPNet": SIZES, "Roberta": SIZES, "XLMRoberta": SIZES, "DistilBert": DISTIL | {"pad_token_id": 0},
    "Albert": SIZES | {"embedding_size": 16}, "Electra": SIZES | {"embedding_size": 16}, "Camembert": SIZES,
    "DebertaV2": SIZES | DEBERTA, "ModernBert": SIZES, "NomicBert": SIZES, "EuroBert": GROUPED,
    "T5": T5, "MT5": T5, "Qwen2": GROUPED, "Qwen3": GROUPED, "Llama": GROUPED, "Mistral": GROUPED,
    "Gemma3": GROUPED | {"use_bidirectional_attention": True},
}  # fmt: skip
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
STATIC = ("static", "bag of words", "word embeddings and LSTM")
MODELS = {"T5": "T5EncoderModel", "MT5": "MT5EncoderModel", "Gemma3": "Gemma3TextModel"}


def sentence_transformers() -> Cases:
    """Bi-encoders of many families, cross-encoders, sparse and multi-vector encoders, and modules without attention."""
    cases: Cases = {f"SentenceTransformer, {family}": partial(_embedding, family) for family in FAMILIES}
    for pooling in ("cls", "lasttoken", "max", "weightedmean"):
        cases[f"SentenceTransformer, Bert, {pooling} pooling"] = partial(_embedding, "Bert", pooling)
    for more in ("dense and normalize", "weighted layers", "CNN", "eager attention"):
        cases[f"SentenceTransformer, Bert, {more}"] = partial(_followed_by, more)
    for family in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "DebertaV2", "ModernBert"):
        cases[f"CrossEncoder, {family}"] = partial(_cross, family)
    cases["CrossEncoder, Qwen3, logit score"] = _cross_causal
    cases |= {f"SparseEncoder, {family}, SPLADE": partial(_splade, family) for family in ("Bert", "DistilBert")}
    cases["SparseEncoder, Bert, auto-encoder"] = _sparse_codes
    cases |= {f"MultiVectorEncoder, {family}": partial(_multi_vector, family) for family in ("Bert", "ModernBert")}
    cases["SentenceTransformer, router, Bert and static"] = partial(_router, True)
    cases["SentenceTransformer, router, two Berts"] = partial(_router, False)
    cases |= {f"SentenceTransformer, CLIP, {kind}": partial(_clip, kind) for kind in ("text", "image")}
    cases |= {f"SentenceTransformer, {name}": partial(_without_attention, name) for name in STATIC}
    cases["SparseEncoder, static"] = partial(_without_attention, "sparse static")
    return cases


def tokenizer() -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "</s>": 1, "<unk>": 2, "<mask>": 3}
    raw = Tokenizer(WordLevel(special | {word: i for i, word in enumerate(WORDS, 4)}, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    raw.post_processor = TemplateProcessing(
        single="</s> $A </s>", pair="</s> $A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "cls_token": "</s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", mask_token="<mask>", model_max_length=32, **names
    )


def _transformer(family: str, kind: str = "Model", task: str | None = None, **options: Any) -> Any:
    """A module `Transformer` of sentence-transformers, loaded from a folder with random weights."""
    transformers = importlib.import_module("transformers")
    modules = importlib.import_module("sentence_transformers.base.modules")
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**FAMILIES[family])
    name = MODELS.get(family, f"{family}Model") if kind == "Model" else f"{family}{kind}"
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, name)(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return modules.Transformer(folder, **({"transformer_task": task} if task else {}), **options)


def _package(name: str = "SentenceTransformer") -> Any:
    return getattr(importlib.import_module("sentence_transformers"), name)


def _module(name: str) -> Any:
    packages = (
        importlib.import_module("sentence_transformers.base.modules"),
        importlib.import_module("sentence_transformers.sentence_transformer.modules"),
        importlib.import_module("sentence_transformers.cross_encoder.modules"),
        importlib.import_module("sentence_transformers.sparse_encoder.modules"),
        importlib.import_module("sentence_transformers.multi_vector_encoder.modules"),
    )
    for package in packages:
        if hasattr(package, name):
            return getattr(package, name)
    raise NotImplementedError(f"sentence-transformers has no module {name}")


def _embedding(family: str, pooling: str = "mean") -> Case:
    model = _package()(modules=[_transformer(family), _module("Pooling")(32, pooling)], device="cpu")
    return model, (model.preprocess(TEXTS),)


def _followed_by(name: str) -> Case:
    options = {"model_kwargs": {"attn_implementation": "eager"}} if name == "eager attention" else {}
    if name == "weighted layers":
        options = {"config_kwargs": {"output_hidden_states": True}}
    first, pooling = _transformer("Bert", **options), _module("Pooling")
    if name == "dense and normalize":
        modules = [first, pooling(32), _module("Dense")(32, 16), _module("Normalize")()]
    elif name == "weighted layers":
        modules = [first, _module("WeightedLayerPooling")(32, num_hidden_layers=2, layer_start=1), pooling(32)]
    elif name == "CNN":
        modules = [first, _module("CNN")(32, 16), pooling(48)]
    else:
        modules = [first, pooling(32)]
    model = _package()(modules=modules, device="cpu")
    return model, (model.preprocess(TEXTS),)


def _cross(family: str) -> Case:
    module = _transformer(family, "ForSequenceClassification", "sequence-classification")
    model = _package("CrossEncoder")(modules=[module], device="cpu")
    return model, (model.preprocess(PAIRS),)


def _cross_causal() -> Case:
    module = _transformer("Qwen3", "ForCausalLM", "text-generation")
    model = _package("CrossEncoder")(modules=[module, _module("LogitScore")(5, 6)], device="cpu")
    return model, (model.preprocess(PAIRS),)


def _splade(family: str) -> Case:
    modules = [_transformer(family, "ForMaskedLM", "fill-mask"), _module("SpladePooling")()]
    model = _package("SparseEncoder")(modules=modules, device="cpu")
    return model, (model.preprocess(TEXTS),)


def _sparse_codes() -> Case:
    modules = [_transformer("Bert"), _module("Pooling")(32), _module("SparseAutoEncoder")(32, 64, k=4, k_aux=8)]
    model = _package("SparseEncoder")(modules=modules, device="cpu")
    return model, (model.preprocess(TEXTS),)


def _multi_vector(family: str) -> Case:
    dense = _module("Dense")(
        32, 16, bias=False, module_input_name="token_embeddings", module_output_name="token_embeddings"
    )
    modules = [_transformer(family), dense, _module("MultiVectorMask")(), _module("Normalize")("token_embeddings")]
    model = _package("MultiVectorEncoder")(modules=modules, device="cpu")
    return model, (model.preprocess(TEXTS),)


def _router(has_static_documents: bool) -> Case:
    queries = [_transformer("Bert"), _module("Pooling")(32)]
    static = _module("StaticEmbedding")(tokenizer(), embedding_dim=32)
    documents = [static] if has_static_documents else [_transformer("Bert"), _module("Pooling")(32)]
    router = _module("Router").for_query_document(queries, documents)
    model = _package()(modules=[router], device="cpu")
    return model, {"input": model.preprocess(TEXTS, task="query"), "task": "query"}


def _clip(kind: str) -> Case:
    transformers = importlib.import_module("transformers")
    text = {key: SIZES[key] for key in SIZES if key != "num_labels"}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    size = {"height": 32, "width": 32}
    images = transformers.CLIPImageProcessor(size=size, crop_size=size)
    with tempfile.TemporaryDirectory() as folder:
        transformers.CLIPModel(config).save_pretrained(folder)
        transformers.CLIPProcessor(images, tokenizer()).save_pretrained(folder)
        module = _module("Transformer")(folder)
    model = _package()(modules=[module], device="cpu")
    if kind == "text":
        return model, (model.preprocess(TEXTS),)
    return model, ({"pixel_values": torch.randn(2, 3, 32, 32), "modality": "image"},)


def _without_attention(name: str) -> Case:
    if name == "sparse static":
        model = _package("SparseEncoder")(modules=[_module("SparseStaticEmbedding")(tokenizer())], device="cpu")
    elif name == "static":
        model = _package()(modules=[_module("StaticEmbedding")(tokenizer(), embedding_dim=32)], device="cpu")
    elif name == "word embeddings and LSTM":
        words = _module("WordEmbeddings")(tokenizer(), torch.randn(48, 32).numpy())
        model = _package()(modules=[words, _module("LSTM")(32, 16), _module("Pooling")(32)], device="cpu")
    else:
        model = _package()(modules=[_module("BoW")(WORDS), _module("Dense")(len(WORDS), 16)], device="cpu")
    return model, (model.preprocess(TEXTS),)

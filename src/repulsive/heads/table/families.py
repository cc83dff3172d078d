"""The family table: projections and head layout of known attention classes, as data.

A row names the projections of an attention class and, for each, a *layout*: the axes of its output features from the
slowest to the fastest, as in einops.

    q head dim                 one projection for q, head after head
    qkv head dim               packed: all of q, then all of k, then all of v
    head qkv dim               interleaved: q, k and v of head 0, then of head 1, ...
    q head dim | kv head dim   blocks of different size, one after the other
    group q+k+v dim            per key-value head: the q heads it serves, then its k, then its v
    4 qvk head dim             a number is an axis over which the heads are divided

A weight in einsum notation has one axis for heads and one for features. Its layout names all of its axes, with `in` for
the inputs:

    q head in dim              a parameter [heads, inputs, features]

Letters other than q, k and v (such as g for a gate) take up features but belong to no head. In a block that contains q,
`head` is the number of query heads; in other blocks it is the number of key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "nhead",
    "num_q_heads",
    "num_attn_heads",
    "h",
    "config.num_attention_heads",
    "config.num_heads",
    "config.n_heads",
    "config.n_head",
)
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
    "kv_n_heads",
    "config.num_key_value_heads",
    "config.num_kv_heads",
    "config.n_kv_heads",
    "config.n_query_groups",
)
HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "key_value_proj_dim")


# Classes that have the projections of attention but no softmax over query-key pairs, so their rows are not heads.
# Signatures must not match them. From DaViT, XCiT, EdgeNeXt and CoaT in timm and Autoformer in transformers.
NO_HEADS = {
    "ChannelAttentionV2": "attends over groups of channels, each computed from rows of every head",
    "ChannelAttention": "attends over channels, not tokens",
    "XCA": "attends over channels, not tokens",
    "CrossCovarianceAttn": "attends over channels, not tokens",
    "AutoformerAttention": "weights time lags by the correlation of q and k, as a mean over heads",
    "FactorAttnConvRelPosEnc": "applies softmax to the keys alone, not to query-key scores",
}


@dataclass(frozen=True)
class Family:
    """One row of the family table: an attention class, its projections and where to find its number of heads.

    Args:
        name: name of the family in reports.
        classes: patterns (fnmatch) of class names; "*" matches any class that has the projections (a signature).
        projections: (attribute path, layout) pairs; a path leads to a module with a weight, or to a parameter.
        heads: attribute paths that may hold the number of (query) heads, tried in order.
        kv_heads: attribute paths that may hold the number of key-value heads; if none exists, the shapes decide.
        where: "encoder", "decoder" or "cross", used if neither the path nor the module shows it.
        out: attribute path of the output projection; "../" starts from the parent module. In einsum notation, the name
            of a parameter, in which the features of a head follow the axis of heads.
        package: top-level package that defines the classes. A class of the same name in another package is a guess.
    """

    name: str
    classes: tuple[str, ...]
    projections: tuple[tuple[str, str], ...]
    heads: tuple[str, ...] = HEADS
    kv_heads: tuple[str, ...] = KV_HEADS
    where: str | None = None
    out: str | None = None
    package: str = ""

    @property
    def generic(self) -> bool:
        return self.classes == ("*",)


def _separate(q: str, k: str, v: str, axes: str = "head dim") -> tuple[tuple[str, str], ...]:
    return ((q, f"q {axes}"), (k, f"k {axes}"), (v, f"v {axes}"))


_transformers = partial(Family, package="transformers")
_geometric = partial(Family, package="torch_geometric", heads=("heads",))
_lens = partial(
    Family, package="transformer_lens", heads=("cfg.n_heads",), kv_heads=("cfg.n_key_value_heads",), out="W_O"
)

_PROJ = _separate("q_proj", "k_proj", "v_proj")
_BERT = _separate("query", "key", "value")
_TO = _separate("to_q", "to_k", "to_v")

# The first row that fits is used: named classes first, then signatures that match any class.
FAMILIES: tuple[Family, ...] = (
    # torch
    Family("torch", ("MultiheadAttention",), (("in_proj_weight", "qkv head dim"),), out="out_proj", package="torch"),
    Family(
        "torch-separate",
        ("MultiheadAttention",),
        _separate("q_proj_weight", "k_proj_weight", "v_proj_weight"),
        out="out_proj",
        package="torch",
    ),
    # additive attention, A = softmax(W2 tanh(W1 H)): a head is a row of W2
    Family(
        "additive",
        ("AdditiveAttention",),
        (("score", "v head dim"),),
        heads=("heads", "num_heads"),
        package="repulsive",
    ),
    # graphs
    _geometric("gat", ("GATConv", "FusedGATConv"), (("lin", "v head dim"),)),
    _geometric("gat", ("GATConv", "FusedGATConv"), (("lin_src", "v head dim"),)),
    _geometric("gatv2", ("GATv2Conv",), (("lin_l", "v head dim"),)),
    _geometric("transformer-conv", ("TransformerConv",), _separate("lin_query", "lin_key", "lin_value")),
    # encoders
    _transformers(
        "bert",
        ("Bert*Attention", "Roberta*Attention", "Electra*Attention", "XLMRoberta*Attention", "Camembert*Attention"),
        _BERT,
        where="encoder",
        out="../output.dense",
    ),
    _transformers("albert", ("AlbertAttention",), _BERT, where="encoder", out="dense"),
    _transformers(
        "distilbert",
        ("DistilBertSelfAttention", "MultiHeadSelfAttention"),
        _separate("q_lin", "k_lin", "v_lin"),
        where="encoder",
        out="out_lin",
    ),
    _transformers("deberta", ("DisentangledSelfAttention",), (("in_proj", "head qkv dim"),), where="encoder"),
    _transformers("vit", ("ViTAttention",), _PROJ, where="encoder", out="o_proj"),
    _transformers("vit", ("ViTSelfAttention",), _BERT, where="encoder", out="../output.dense"),
    _transformers("modernbert", ("ModernBertAttention",), (("Wqkv", "qkv head dim"),), where="encoder", out="Wo"),
    _transformers(
        "xlnet",
        ("XLNetRelativeAttention",),
        _separate("q", "k", "v", axes="in head dim"),
        where="encoder",
        out="o",
    ),
    # encoder-decoders
    _transformers("t5", ("*T5Attention", "UMT5Attention"), _separate("q", "k", "v"), heads=("n_heads",), out="o"),
    _transformers(
        "bart", ("BartAttention", "MarianAttention", "MBartAttention", "PegasusAttention"), _PROJ, out="out_proj"
    ),
    # decoders; gpt2-cross comes before gpt2, because only cross-attention has a q projection of its own
    _transformers(
        "gpt2-cross",
        ("GPT2Attention", "ImageGPTAttention", "DecisionTransformerGPT2Attention"),
        (("q_attn", "q head dim"), ("c_attn", "kv head dim")),
        where="cross",
        out="c_proj",
    ),
    _transformers(
        "gpt2",
        ("GPT2Attention", "ImageGPTAttention", "DecisionTransformerGPT2Attention", "OpenAIGPT*Attention"),
        (("c_attn", "qkv head dim"),),
        where="decoder",
        out="c_proj",
    ),
    _transformers("openai-gpt", ("Attention",), (("c_attn", "qkv head dim"),), heads=("n_head",), where="decoder"),
    _transformers(
        "gpt-bigcode", ("GPTBigCodeAttention",), (("c_attn", "group q+k+v dim"),), where="decoder", out="c_proj"
    ),
    _transformers(
        "gpt-neox",
        ("GPTNeoX*Attention", "BloomAttention", "PersimmonAttention"),
        (("query_key_value", "head qkv dim"),),
        where="decoder",
        out="dense",
    ),
    _transformers(
        "falcon", ("FalconAttention",), (("query_key_value", "group q+k+v dim"),), where="decoder", out="dense"
    ),
    _transformers("codegen", ("CodeGenAttention",), (("qkv_proj", "4 qvk head dim"),), where="decoder", out="out_proj"),
    _transformers(
        "phi3",
        ("Phi3Attention", "Phi4MultimodalAttention"),
        (("qkv_proj", "q head dim | kv head dim"),),
        where="decoder",
        out="o_proj",
    ),
    _transformers("dbrx", ("DbrxAttention",), (("Wqkv", "q head dim | kv head dim"),), where="decoder", out="out_proj"),
    _transformers("mpt", ("MptAttention",), (("Wqkv", "qkv head dim"),), where="decoder", out="out_proj"),
    _transformers("bark", ("BarkSelfAttention",), (("att_proj", "qkv head dim"),), where="decoder", out="out_proj"),
    _transformers(
        "gated-q",
        ("Qwen3NextAttention", "Qwen3_5*Attention"),
        (("q_proj", "head qg dim"), ("k_proj", "k head dim"), ("v_proj", "v head dim")),
        where="decoder",
        out="o_proj",
    ),
    _transformers(
        "llama",
        ("Llama*Attention", "Mistral*Attention", "Mixtral*Attention", "Qwen2*Attention", "Qwen3*Attention"),
        _PROJ,
        where="decoder",
        out="o_proj",
    ),
    # TransformerLens (HookedTransformer, until version 3)
    _lens("transformer-lens", ("Attention",), _separate("W_Q", "W_K", "W_V", axes="head in dim")),
    _lens("transformer-lens", ("GroupedQueryAttention",), _separate("W_Q", "_W_K", "_W_V", axes="head in dim")),
    # teaching and translation code
    Family("annotated", ("MultiHeadedAttention",), _separate("linears.0", "linears.1", "linears.2"), out="linears.3"),
    Family(
        "opennmt",
        ("MultiHeadedAttention",),
        _separate("linear_query", "linear_keys", "linear_values"),
        heads=("head_count",),
        out="final_linear",
        package="onmt",
    ),
    Family(
        "joeynmt",
        ("MultiHeadedAttention",),
        _separate("q_layer", "k_layer", "v_layer"),
        out="output_layer",
        package="joeynmt",
    ),
    # signatures: guesses from names and shapes, unless `surveyed_classes` lists the class
    Family("q_proj/k_proj/v_proj", ("*",), _PROJ),
    Family("q_proj.linear/...", ("*",), _separate("q_proj.linear", "k_proj.linear", "v_proj.linear")),
    Family("query/key/value", ("*",), _BERT),
    Family("projection_query/...", ("*",), _separate("projection_query", "projection_key", "projection_value")),
    Family("q/k/v", ("*",), _separate("q", "k", "v")),
    Family("q/kv", ("*",), (("q", "q head dim"), ("kv", "kv head dim")), out="proj"),
    Family("to_q/... + add_q_proj/...", ("*",), (*_TO, *_separate("add_q_proj", "add_k_proj", "add_v_proj"))),
    Family("to_q/... + add_k_proj/...", ("*",), (*_TO, ("add_k_proj", "k head dim"), ("add_v_proj", "v head dim"))),
    Family("to_q/to_k/to_v", ("*",), _TO),
    Family("to_q/to_kv", ("*",), (("to_q", "q head dim"), ("to_kv", "kv head dim"))),
    Family("to_qkv", ("*",), (("to_qkv", "qkv head dim"),)),
    Family("qkv", ("*",), (("qkv", "qkv head dim"),), out="proj"),
    Family("qkv_proj", ("*",), (("qkv_proj", "qkv head dim"),), out="o_proj"),
    Family("in_proj_weight", ("*",), (("in_proj_weight", "qkv head dim"),), out="out_proj"),
    Family("c_q/c_k/c_v", ("*",), _separate("c_q", "c_k", "c_v"), where="decoder", out="c_proj"),
    Family("c_attn", ("*",), (("c_attn", "qkv head dim"),), where="decoder", out="c_proj"),
    Family("Wqkv", ("*",), (("Wqkv", "qkv head dim"),)),
    Family("q_lin/k_lin/v_lin", ("*",), _separate("q_lin", "k_lin", "v_lin")),
    Family("query_proj/key_proj/value_proj", ("*",), _separate("query_proj", "key_proj", "value_proj")),
    Family("linear_q/linear_k/linear_v", ("*",), _separate("linear_q", "linear_k", "linear_v")),
    Family("wq/wk/wv", ("*",), _separate("wq", "wk", "wv")),
    Family("w_q/w_k/w_v", ("*",), _separate("w_q", "w_k", "w_v")),
    Family("Wq/Wk/Wv", ("*",), _separate("Wq", "Wk", "Wv")),
)

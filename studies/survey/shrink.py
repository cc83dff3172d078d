"""Shrink any transformers configuration, by rules on the names of its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

MOST_PARAMETERS = 120_000_000

# (pattern of the name, maximum); the first match applies
RULES: tuple[tuple[str, int], ...] = (
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts", 2),
    (r"(n_group|topk_group|num_expert_group)s?", 1),
    (r"(num|n)_(\w+_)?experts|moe_num_experts|num_shared_experts", 4),
    (r"n_shared_experts|first_k_dense_replace", 1),
    (r"\w*num_(key_value|kv)_heads|n_kv_heads|num_kv", 2),
    (r"(linear_)?(num|n)_(\w*_)?heads?|(encoder|decoder)_attention_heads|num_attention_heads|\w+_num_heads", 4),
    (r"qk_head_dim", 32),
    (r"rotary_dim", 8),
    (r"full_attention_interval|\w*attn_layer_period|global_attn_every_n_layers|no_rope_layer_interval", 2),
    (r"attn_layer_offset", 1),
    (r"\w*head_dim|d_kv|attention_head_size|d_head|kv_channels", 16),
    (r"(q|kv|o)_lora_rank", 32),
    (r"num_mem_blocks|num_nextn_predict_layers", 1),
    (r"(num_|n_)?(\w+_)?(hidden_)?(layers|layer|blocks)|depth|\w+_depth", 2),
    (r"vocab_size\w*|\w+_vocab_size", 300),
    (r"(\w+_)?(intermediate|inner|ffn|mlp|feed_?forward)(_\w+)?(_size|_dim|_hidden_size)?|d_ff|n_inner", 64),
    (r"(\w+_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|emb_dim|d_embed|model_dim)", 64),
    (r"dim|width", 64),
    (r"projection_dim|out_hidden_size|proj_dim", 64),
)


def tiny_configs(config_class: type) -> Iterator[Any]:
    """Configurations from most to least shrunk; later ones skip rules that may break an architecture."""
    for level in (RULES, _but("head_dim", "_embd|embed_dim"), _only(r"layers|depth|vocab|experts"), _only("layers")):
        try:
            yield _shrunk(config_class, level)
        except Exception:  # a rule broke this configuration: try with fewer rules
            continue
    yield config_class()


def too_large(config: Any) -> bool:
    """Whether a model has more than `MOST_PARAMETERS`, counted without allocating them."""
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except NotImplementedError:  # computes with values, which meta tensors do not have
        return False
    return sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS


def _shrunk(config_class: type, rules: tuple[tuple[str, int], ...]) -> Any:
    default = config_class()
    return config_class(**_smaller(default, rules))


def _smaller(config: Any, rules: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    small: dict[str, Any] = {}
    names = dict(getattr(config, "attribute_map", {}))
    for name, value in vars(config).items():
        if name.startswith("_") or name in names:
            continue
        if isinstance(value, PreTrainedConfig):
            small[name] = _smaller(value, rules) | {"model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _number(name, value, names, rules)
        elif name == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))  # one layer of each kind: hybrid models keep their attention
            small[name] = kinds if len(kinds) > 1 else kinds * 2
    if "layer_types" in small:
        small["num_hidden_layers"] = len(small["layer_types"])
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None and heads == getattr(config, "num_key_value_heads", None):
        small["num_key_value_heads"] = small.get("num_attention_heads", heads)
    return small


def _number(name: str, value: int, names: dict[str, str], rules: tuple[tuple[str, int], ...]) -> int:
    if name.endswith("token_id") or name.endswith("token_index"):
        return value if value < 0 else value % 90 + 3 if value > 90 else value
    aliases = [name, *(alias for alias, real in names.items() if real == name)]
    for pattern, target in rules:
        if any(re.fullmatch(pattern, alias) for alias in aliases):
            return min(value, target) if value > 0 else value
    return value


def _but(*dropped: str) -> tuple[tuple[str, int], ...]:
    return tuple(rule for rule in RULES if not any(re.search(word, rule[0]) for word in dropped))


def _only(words: str) -> tuple[tuple[str, int], ...]:
    return tuple(rule for rule in RULES if re.search(words, rule[0]) and "heads" not in rule[0])

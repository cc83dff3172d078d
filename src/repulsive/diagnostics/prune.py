"""Prune heads: make a smaller model that computes the same function as the model with these heads ablated.

Only classes in `RESIZABLE`, which support any number of heads, can be pruned; for other classes use `ablate`.
`save_pruned` writes a pruned model, `load_pruned` loads it into a model that was built at full size.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers
from repulsive.diagnostics.redundancy import head_place
from repulsive.errors import CheckpointError, HeadLayoutError, NoHeadsFound, SelectionError
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.layout import consecutive_rows
from repulsive.heads.module_paths import module_of, unwrap
from repulsive.heads.table.match import is_conv1d
from repulsive.safety.permissions import ordinary_permissions

# Attention classes (module and name) that reshape q, k and v by the head size -> attributes to update: the number of
# heads, of key-value heads, of query heads per key-value head, or of features of all heads. Classes that use their
# configuration instead get attributes of these names, and `find_heads` counts heads by them from then on. Every
# projection is an nn.Linear or transformers' Conv1D.
_BERT = {"num_attention_heads": "heads", "all_head_size": "features"}
_LLAMA = {"num_heads": "heads", "num_key_value_heads": "kv heads", "num_key_value_groups": "queries per kv head"}
RESIZABLE: Mapping[str, Mapping[str, str]] = {
    **{f"transformers.*.{name}*Attention": _BERT for name in ("Bert", "Roberta", "Electra", "XLMRoberta", "Camembert")},
    "transformers.*.AlbertAttention": _BERT,
    "transformers.*.ViTSelfAttention": _BERT,
    "transformers.*.ViTAttention": {"num_attention_heads": "heads"},
    "transformers.*.DistilBertSelfAttention": {"n_heads": "heads", "dim": "features"},
    "transformers.*distilbert*.MultiHeadSelfAttention": {"n_heads": "heads", "dim": "features"},
    "transformers.*.GPT2Attention": {"num_heads": "heads", "split_size": "features"},
    **{
        f"transformers.*.{name}Attention": {"num_heads": "heads", "embed_dim": "features"}
        for name in ("Bart", "Marian", "MBart", "Pegasus")
    },
    **{
        f"transformers.*.{name}Attention": _LLAMA
        for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma", "Granite")
    },
    "repulsive.lab.systems.translation.attention.Attention": {"num_heads": "heads"},
}
# Models with additive attention -> parameters of the readout with a block per head, and the axis of these blocks.
CONSUMERS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "SentenceClassifier": (("classify.1.weight", 1),),
    "PairClassifier": (("premise_gate", 0), ("hypothesis_gate", 0), ("classify.1.weight", 1)),
}
PRUNED = "pruned.json"  # file in a model folder with the number of remaining heads of each layer


def prune(model: nn.Module, heads: Iterable[tuple[int | str, int]]) -> nn.Module:
    """Return a smaller copy of the model without the given heads; the model itself does not change.

    Args:
        model: BERT, RoBERTa, ELECTRA, XLM-R, CamemBERT, ALBERT, DistilBERT, ViT, GPT-2, BART, mBART, Marian, Pegasus,
            Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma or Granite of transformers, or
            the Transformer of `repulsive.lab`.
        heads: (layer, head) pairs as in `ablate`, of query heads; every layer must keep one head. A key-value head is
            removed with the last query head that uses it. If the remaining key-value heads serve unequal numbers of
            query heads, some are duplicated.

    Raises:
        HeadLayoutError: this attention class cannot be pruned.
        SelectionError: no heads are given, a layer or head does not exist, or a layer would lose all of its heads.

    Example:
        >>> from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig.tiny(vocabulary=20))
        >>> smaller = prune(model, [(0, 1), (0, 2)])
        >>> smaller.encoder.layers[0].self_attention.q_proj
        Linear(in_features=128, out_features=64, bias=True)
    """
    try:
        layers = find_attention_layers(model)
    except NoHeadsFound:
        name = type(unwrap(model)).__name__
        raise HeadLayoutError(
            f"{name} has no attention class that is known to support fewer heads, so it cannot be pruned; use "
            "Heads(model, inputs).ablated(heads), which computes the same function at full size"
        ) from None
    chosen = {head_place(layers, place) for place in heads}
    if not chosen:
        raise SelectionError("prune: no heads given; expected a list of (layer, head) pairs, such as [(0, 1)]")
    keep = {
        layer.name: [head for head in range(layer.num_heads) if (row, head) not in chosen]
        for row, layer in enumerate(layers)
    }
    return _pruned_copy(model, layers, keep)


def save_pruned(model: nn.Module, folder: str | Path) -> Path:
    """Save a pruned model as safetensors with its number of heads per layer, and `config.json` for transformers.

    Args:
        model: the result of `prune`.
        folder: output folder; it is created.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    path = Path(folder)
    inner: Any = unwrap(model)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with ordinary_permissions(path):
            _save_weights(inner, path)
        remaining = {layer.name: layer.num_heads for layer in find_attention_layers(model)}
        (path / PRUNED).write_text(json.dumps(remaining, indent=1), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error.strerror}); choose another folder") from error
    return path


def _save_weights(model: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        parameters = inspect.signature(model.save_pretrained).parameters
        # Keep the model's own parameter names: load_pruned does not know those of older versions.
        options = {"save_original_format": False} if "save_original_format" in parameters else {}
        model.save_pretrained(folder, **options)
    else:
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))


def load_pruned(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of `model` with the saved numbers of heads and the saved weights.

    Args:
        model: a model of the pruned class at full size; for transformers, built from the saved `config.json`.
        weights: a state dict, a safetensors file, or a folder that `save_pruned` wrote.

    Raises:
        CheckpointError: there are no weights, or they do not match the model.
    """
    state = weights if isinstance(weights, Mapping) else _read(Path(weights))
    layers = find_attention_layers(model)
    groups = _by_layer(model)
    keep, kv_heads = {}, {}
    for layer in layers:
        counts = {}
        for group in groups[layer.name]:
            s = group.slices[0]
            saved = state.get(s.parameter_name)
            if saved is None:
                raise CheckpointError(
                    f"the weights have no {s.parameter_name}: they do not belong to a {type(model).__name__}, or were "
                    "not written by save_pruned"
                )
            counts[group.num_heads] = group.num_heads * saved.shape[s.axis] // s.parameter().shape[s.axis]
        keep[layer.name] = list(range(counts[layer.num_heads]))
        kv_heads[layer.name] = [0] * counts[min(counts)]  # only their number matters: weights are loaded below
    pruned = _pruned_copy(model, layers, keep, kv_heads)
    try:
        missing, unknown = unwrap(pruned).load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"the weights do not match this {type(model).__name__}: {error}") from error
    parameters = pruned.state_dict(keep_vars=True)
    loaded = {parameter.data_ptr() for name, parameter in parameters.items() if name in state}
    missing = [name for name in missing if parameters[name].data_ptr() not in loaded]  # tied weights are loaded
    computed = getattr(unwrap(pruned), "_keys_to_ignore_on_save", None) or ()  # sinusoids are never saved
    missing = [name for name in missing if not any(re.search(pattern, name) for pattern in computed)]
    if missing or unknown:
        raise CheckpointError(
            f"the weights do not match this {type(model).__name__}: missing {missing[:3]}, unknown {list(unknown)[:3]}"
        )
    return pruned


def _pruned_copy(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    keep: Mapping[str, Sequence[int]],
    kv_heads: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    """Copy a model with only the query heads `keep` of each layer; `kv_heads=None` derives the key-value heads."""
    smaller = [layer for layer in layers if len(keep[layer.name]) < layer.num_heads]
    for layer in smaller:
        _attributes(unwrap(model), layer)
        if not keep[layer.name]:
            raise SelectionError(f"{layer.name} would lose all of its {layer.num_heads} heads; keep at least one")
    _refuse_adapters(model)
    pruned = copy.deepcopy(model)
    groups, copies = _by_layer(pruned), {layer.name: layer for layer in find_attention_layers(pruned)}
    for name in (layer.name for layer in smaller):
        if kv_heads:
            kept_kv = kv_heads[name]
        else:
            queries_per_kv = copies[name].num_heads // min(group.num_heads for group in groups[name])
            kept_kv = kept_kv_heads(keep[name], queries_per_kv)
        _prune_layer(unwrap(pruned), copies[name], groups[name], list(keep[name]), list(kept_kv))
    return pruned


def kept_kv_heads(keep: Sequence[int], queries_per_kv: int) -> list[int]:
    """List the key-value heads of the remaining query heads, duplicated so that each serves the same number.

    Args:
        keep: the remaining query heads.
        queries_per_kv: number of consecutive query heads that share a key-value head.

    Example:
        >>> kept_kv_heads([0, 1, 3], 2)  # key-value head 0 serves two remaining query heads, head 1 serves one
        [0, 0, 1]
        >>> kept_kv_heads([0, 1], 2)
        [0]
    """
    counts = Counter(head // queries_per_kv for head in keep)
    served_by_each = math.gcd(*counts.values())
    return [head for head, count in counts.items() for _ in range(count // served_by_each)]


def _prune_layer(
    model: nn.Module, layer: AttentionLayer, groups: Sequence[HeadGroup], keep: list[int], keep_kv: list[int]
) -> None:
    attributes = _attributes(model, layer)
    kept = {id(s): keep if group.num_heads == layer.num_heads else keep_kv for group in groups for s in group.slices}
    weights = {(id(s.module), s.attribute): s for group in groups for s in group.slices}
    for key, s in weights.items():  # q, k and v may share one weight, which is pruned once
        slices = [x for group in groups for x in group.slices if (id(x.module), x.attribute) == key]
        rows = torch.cat([x.rows[kept[id(x)]].flatten() for x in slices])
        rows = rows.sort().values if len(slices) > 1 else rows
        _select(s.module, s.attribute, s.axis, rows)
        if isinstance(getattr(s.module, "bias", None), Tensor):
            _select(s.module, "bias", 0, rows)
    if layer.kind == "projection":
        columns = consecutive_rows(layer.num_heads, layer.head_dim)[keep].flatten()
        _select(layer.module, "weight", 0 if is_conv1d(layer.module) else 1, columns)
    else:
        encoder: Any = model.encoder
        encoder.config = replace(encoder.config, heads=len(keep))  # builds a model of the new size
        for path, axis in CONSUMERS[type(model).__name__]:
            owner, _, attribute = path.rpartition(".")
            module = model.get_submodule(owner)
            size = getattr(module, attribute).shape[axis]
            blocks = consecutive_rows(layer.num_heads, size // layer.num_heads)[keep].flatten()
            _select(module, attribute, axis, blocks)
    counts = {"heads": len(keep), "features": len(keep) * layer.head_dim}
    counts |= {"kv heads": len(keep_kv), "queries per kv head": len(keep) // len(keep_kv)}
    for name, quantity in attributes.items():
        setattr(layer.attention, name, counts[quantity])


def _attributes(model: nn.Module, layer: AttentionLayer) -> Mapping[str, str]:
    """Map each attribute to update after pruning a layer to the quantity that it holds.

    Raises:
        HeadLayoutError: the class does not support another number of heads.
    """
    kind = type(layer.attention)
    if layer.kind == "result" and type(model).__name__ in CONSUMERS:
        return {"heads": "heads"}
    for pattern, attributes in RESIZABLE.items():
        if fnmatchcase(f"{kind.__module__}.{kind.__qualname__}", pattern) and layer.kind == "projection":
            return attributes
    raise HeadLayoutError(
        f"{layer.name or kind.__name__}: {kind.__name__} cannot be pruned, since it is not a class that is known to "
        "support fewer heads; use ablate(model, heads), which computes the same function at full size"
    )


def _refuse_adapters(model: nn.Module) -> None:
    """Raise an error for LoRA adapters: rows of lora_B would be removed, but not the rows of the frozen weight."""
    for group in find_heads(model):
        for s in group.slices:
            if ".lora_B." in s.parameter_name:
                raise HeadLayoutError(f"{s.parameter_name}: merge the adapters first (model.merge_and_unload())")


def _by_layer(model: nn.Module) -> dict[str, list[HeadGroup]]:
    layers: dict[str, list[HeadGroup]] = {}
    for group in find_heads(model):
        layers.setdefault(module_of(group), []).append(group)
    return layers


def _select(module: nn.Module, attribute: str, axis: int, kept: Tensor) -> None:
    """Replace a parameter by the kept rows or columns, and update the size attributes of its module."""
    old = getattr(module, attribute)
    new = nn.Parameter(old.detach().index_select(axis, kept.to(old.device)).clone(), old.requires_grad)
    setattr(module, attribute, new)
    if isinstance(module, nn.Linear) and attribute == "weight":
        module.out_features, module.in_features = new.shape
    elif is_conv1d(module) and attribute == "weight":
        module.nx, module.nf = new.shape  # type: ignore[assignment]


def _read(path: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"no safetensors file at {str(path)!r}; save the pruned model there first")
    return reduce(lambda a, b: {**a, **b}, (load_file(file) for file in files))

"""Cut heads out of a model for good: smaller weights, the same function as with those heads ablated.

Layers are cut where their class takes any number of heads; which classes do is data. Others say so, and `ablate` still
serves them. `save_pruned` writes a pruned model, `load_pruned` reads it into one that was built at full size.
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

from repulsive.diagnostics.hooks.outlets import Outlet, find_outlets
from repulsive.diagnostics.redundancy import heads_of
from repulsive.errors import CheckpointError, HeadLayoutError, SelectionError
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import module_of, unwrap

# Attention classes (module and name) that shape q, k and v by the size of a head, and the attributes that count heads,
# those that keys and values have, query heads that share one of these, or all features of the heads. Classes that ask
# their configuration get attributes of these names, by which heads are counted from then on. Every projection is an
# nn.Linear or transformers' Conv1D.
_BERT = {"num_attention_heads": "heads", "all_head_size": "features"}
_LLAMA = {"num_heads": "heads", "num_key_value_heads": "shared heads", "num_key_value_groups": "sharing"}
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
    "repulsive.lab.systems.translation.model.Attention": {"num_heads": "heads"},
}
# Models whose additive attention hands on one vector per head: what behind it counts heads, and along which axis.
CONSUMERS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "SentenceClassifier": (("classify.1.weight", 1),),
    "PairClassifier": (("premise_gate", 0), ("hypothesis_gate", 0), ("classify.1.weight", 1)),
}
PRUNED = "pruned.json"  # in a folder: how many heads each layer has left


def prune(model: nn.Module, heads: Iterable[tuple[int | str, int]]) -> nn.Module:
    """A copy of the model without these heads; the model itself stays whole.

    Args:
        model: BERT, RoBERTa, ELECTRA, XLM-R, CamemBERT, ALBERT, DistilBERT, ViT, GPT-2, BART, mBART, Marian, Pegasus,
            Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma or Granite of transformers, or
            the Transformer of `repulsive.lab`.
        heads: (layer, head) pairs as in `ablate`, of query heads; every layer must keep one head. Keys and values that
            several of them share go with the last of these; where the heads left share unequally, they are copied.

    Raises:
        HeadLayoutError: this attention cannot be cut.
        SelectionError: nothing chosen, no such layer or head, or a layer would lose all of its heads.

    Example:
        >>> from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
        >>> whole = Transformer(TransformerConfig.tiny(vocabulary=20))
        >>> smaller = prune(whole, [(0, 1), (0, 2)])
        >>> smaller.encoder.layers[0].self_attention.q_proj
        Linear(in_features=128, out_features=64, bias=True)
    """
    outlets = find_outlets(model)
    names = [outlet.name for outlet in outlets]
    chosen = [(names.index(layer) if layer in names else layer, head) for layer, head in heads]
    wrong = [pair for pair in chosen if pair not in heads_of(outlets)]
    if wrong or not chosen:
        counts = ", ".join(f"{i} {o.name} ({o.num_heads} heads)" for i, o in enumerate(outlets[:6]))
        raise SelectionError(f"prune: {f'no head {wrong[0]}' if wrong else 'no heads named'}; the layers are {counts}")
    keep = {
        outlet.name: [head for head in range(outlet.num_heads) if (layer, head) not in chosen]
        for layer, outlet in enumerate(outlets)
    }
    return _cut(model, outlets, keep)


def save_pruned(model: nn.Module, folder: str | Path) -> Path:
    """Write a pruned model: safetensors, for transformers with its `config.json`, and how many heads are left where.

    Args:
        model: what `prune` gave.
        folder: where to; it is made.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = Path(folder)
    inner: Any = unwrap(model)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if hasattr(inner, "save_pretrained"):
            known = inspect.signature(inner.save_pretrained).parameters
            # Names as the model has them now: those of older versions would not be found again.
            inner.save_pretrained(path, **({"save_original_format": False} if "save_original_format" in known else {}))
        else:
            from safetensors.torch import save_model

            save_model(inner, str(path / "model.safetensors"))
        left = {outlet.name: outlet.num_heads for outlet in find_outlets(model)}
        (path / PRUNED).write_text(json.dumps(left, indent=1), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
    return path


def load_pruned(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> nn.Module:
    """A model as it was saved after pruning: layers of `model` are cut to the saved sizes, then filled.

    Args:
        model: built at full size, of the class that was pruned; for transformers from the saved `config.json`.
        weights: a state dict, a safetensors file, or a folder that `save_pruned` wrote.

    Raises:
        CheckpointError: there are no weights, or they are not of this model.
    """
    state = weights if isinstance(weights, Mapping) else _read(Path(weights))
    outlets = find_outlets(model)
    groups = _by_layer(model)
    keep, shared = {}, {}
    for outlet in outlets:
        counts = {}
        for group in groups[outlet.name]:
            s = group.slices[0]
            saved = state.get(s.parameter_name)
            if saved is None:
                told = f"the weights have no {s.parameter_name}; they are not of a {type(model).__name__}"
                raise CheckpointError(f"{told}, or were not written by save_pruned")
            counts[group.num_heads] = group.num_heads * saved.shape[s.axis] // s.parameter().shape[s.axis]
        keep[outlet.name] = list(range(counts[outlet.num_heads]))
        shared[outlet.name] = [0] * counts[min(counts)]  # what is copied is overwritten
    cut = _cut(model, outlets, keep, shared)
    try:
        missing, unknown = unwrap(cut).load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"the weights do not fit this {type(model).__name__}: {error}") from error
    filled = {p.data_ptr() for name, p in cut.state_dict(keep_vars=True).items() if name in state}
    missing = [name for name in missing if cut.state_dict(keep_vars=True)[name].data_ptr() not in filled]  # tied ones
    computed = getattr(unwrap(cut), "_keys_to_ignore_on_save", None) or ()  # sinusoids are never saved
    missing = [name for name in missing if not any(re.search(pattern, name) for pattern in computed)]
    if missing or unknown:
        raise CheckpointError(
            f"the weights are not of this {type(model).__name__}: missing {missing[:3]}, unknown {list(unknown)[:3]}"
        )
    return cut


def _cut(
    model: nn.Module,
    outlets: Sequence[Outlet],
    keep: Mapping[str, Sequence[int]],
    shared: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    smaller = [outlet for outlet in outlets if len(keep[outlet.name]) < outlet.num_heads]
    for outlet in smaller:
        _attributes(unwrap(model), outlet)
        if not keep[outlet.name]:
            raise SelectionError(f"{outlet.name} would lose all of its {outlet.num_heads} heads; leave it one")
    _refuse_adapters(model)
    cut = copy.deepcopy(model)
    groups, places = _by_layer(cut), {outlet.name: outlet for outlet in find_outlets(cut)}
    for name in (outlet.name for outlet in smaller):
        shares = min(group.num_heads for group in groups[name])
        known = shared[name] if shared else still_shared(keep[name], places[name].num_heads // shares)
        _cut_layer(unwrap(cut), places[name], groups[name], list(keep[name]), list(known))
    return cut


def still_shared(keep: Sequence[int], sharing: int) -> list[int]:
    """Heads of keys and values that query heads need which stay, each as often as makes all shares equal.

    Args:
        keep: the query heads.
        sharing: how many of them, one after the other, share keys and values.

    Example:
        >>> still_shared([0, 1, 3], 2)  # two query heads left of the first share, one of the second
        [0, 0, 1]
        >>> still_shared([0, 1], 2)
        [0]
    """
    counts = Counter(head // sharing for head in keep)
    together = math.gcd(*counts.values())
    return [head for head, count in counts.items() for _ in range(count // together)]


def _cut_layer(
    model: nn.Module, outlet: Outlet, groups: Sequence[HeadGroup], keep: list[int], shared: list[int]
) -> None:
    attributes = _attributes(model, outlet)
    kept = {id(s): keep if group.num_heads == outlet.num_heads else shared for group in groups for s in group.slices}
    weights = {(id(s.module), s.attribute): s for group in groups for s in group.slices}
    for place, s in weights.items():  # q, k and v may lie in one weight, which is cut once
        every = [x for group in groups for x in group.slices if (id(x.module), x.attribute) == place]
        rows = torch.cat([x.rows[kept[id(x)]].flatten() for x in every])
        rows = rows.sort().values if len(every) > 1 else rows
        _select(s.module, s.attribute, s.axis, rows)
        if isinstance(getattr(s.module, "bias", None), Tensor):
            _select(s.module, "bias", 0, rows)
    if outlet.kind == "projection":
        columns = torch.arange(outlet.num_heads * outlet.head_dim).view(outlet.num_heads, -1)[keep].flatten()
        _select(outlet.module, "weight", 0 if type(outlet.module).__name__ == "Conv1D" else 1, columns)
    else:
        encoder: Any = model.encoder
        encoder.config = replace(encoder.config, heads=len(keep))  # a new model of this size can be built from it
        for path, axis in CONSUMERS[type(model).__name__]:
            owner, _, attribute = path.rpartition(".")
            module = model.get_submodule(owner)
            size = getattr(module, attribute).shape[axis]
            blocks = torch.arange(size).view(outlet.num_heads, -1)[keep].flatten()
            _select(module, attribute, axis, blocks)
    counts = {"heads": len(keep), "features": len(keep) * outlet.head_dim}
    counts |= {"shared heads": len(shared), "sharing": len(keep) // len(shared)}
    for name, what in attributes.items():
        setattr(outlet.attention, name, counts[what])


def _attributes(model: nn.Module, outlet: Outlet) -> Mapping[str, str]:
    """What to set on a layer after cutting it.

    Raises:
        HeadLayoutError: its class does not take another number of heads.
    """
    kind = type(outlet.attention)
    if outlet.kind == "result" and type(model).__name__ in CONSUMERS:
        return {"heads": "heads"}
    for pattern, attributes in RESIZABLE.items():
        if fnmatchcase(f"{kind.__module__}.{kind.__qualname__}", pattern) and outlet.kind == "projection":
            return attributes
    raise HeadLayoutError(
        f"{outlet.name or kind.__name__}: heads of {kind.__name__} cannot be cut out, since it is none of the classes "
        "known to take fewer; use ablate(model, heads), which computes the same function at full size"
    )


def _refuse_adapters(model: nn.Module) -> None:
    """Under an adapter the rows of a head are those of lora_B, and the frozen weight would keep its size."""
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
    """Replace a parameter by some of its rows or columns, and tell an `nn.Linear` its new size."""
    old = getattr(module, attribute)
    new = nn.Parameter(old.detach().index_select(axis, kept.to(old.device)).clone(), old.requires_grad)
    setattr(module, attribute, new)
    if isinstance(module, nn.Linear) and attribute == "weight":
        module.out_features, module.in_features = new.shape
    elif type(module).__name__ == "Conv1D" and attribute == "weight":
        module.nx, module.nf = new.shape  # type: ignore[assignment]


def _read(path: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"no safetensors file at {str(path)!r}; save the pruned model there first")
    return reduce(lambda a, b: {**a, **b}, (load_file(file) for file in files))

"""Infer the heads of unknown attention classes from a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import clean, dotted, module_of, number_layers, stack_of, where_of
from repulsive.heads.table.families import NO_HEADS
from repulsive.heads.table.match import kinds_of
from repulsive.heads.trace.feature_axes import with_feature_axes
from repulsive.heads.trace.gradients import PRESENT, Key, RoleGradients, Trace, same_head_ids
from repulsive.heads.trace.mixing import CHANNELS
from repulsive.heads.trace.pairing import with_traced_pairs
from repulsive.heads.trace.reports import HeadReport, check_groups, is_sufficient
from repulsive.heads.trace.tracer import trace_as_needed


@dataclass(frozen=True)
class Completed:
    """Groups from the table and from the trace, with a report on each.

    Args:
        groups: the groups in model order. An inferred group replaces a wrong group of the table.
        reports: one per group. "wrong" means that the table is wrong and the trace found no replacement; such a group
            must not be used.
        misses: module name -> why no heads could be inferred there.
        mixed: reports on groups that are left out because something mixes their heads.
        has_attention: whether the model may contain dot-product attention over tokens; see `Trace`.
    """

    groups: list[HeadGroup]
    reports: list[HeadReport]
    misses: dict[str, str]
    mixed: list[HeadReport]
    has_attention: bool = True

    @property
    def untraced(self) -> list[str]:
        return [report.name for report in self.reports if report.status == "untraced"]

    @property
    def modules(self) -> set[str]:
        return {module_of(group) for group in self.groups}


@dataclass(frozen=True)
class _Split:
    """The rows of one projection, split into the heads of an attention call."""

    key: Key
    rows: Tensor  # [M, R]
    serves: tuple[int, ...] | None


def complete(model: nn.Module, example_inputs: object, groups: Sequence[HeadGroup]) -> Completed:
    """Check the table's groups against a trace, and infer groups that the table lacks or gets wrong."""
    trace = trace_as_needed(
        model, example_inputs, lambda trace: is_sufficient(check_groups(model, groups, trace), trace)
    )
    groups = with_traced_pairs(model, _without_single_streams(model, groups, trace), trace.calls)
    reports = check_groups(model, groups, trace)
    pairs = list(zip(groups, reports, strict=True))
    inferred, misses = infer(model, trace, [g for g, r in pairs if r.status not in ("wrong", "mixed")])
    replaced = {(id(p), g.part) for g in inferred for p in g.parameters()}
    kept = [
        (g, r) for g, r in pairs if r.status != "wrong" or not any((id(p), g.part) in replaced for p in g.parameters())
    ]
    kept += zip(inferred, check_groups(model, inferred, trace), strict=True)
    misses |= {module_of(g): f"{g.part}: {r.note}" for g, r in kept if r.status == "mixed"}
    both = sorted((pair for pair in kept if pair[1].status != "mixed"), key=lambda pair: _position(model, pair[0]))
    ordered = number_layers([g for g, _ in both], [module_of(g) for g, _ in both])
    ordered = with_traced_pairs(model, ordered, trace.calls)  # inferred kv heads may have other numbers
    ordered = with_feature_axes(model, ordered, example_inputs)
    reports = [report for _, report in both]
    proved = [
        replace(group, proof="proved", has_norm=report.has_norm) if report.status == "verified" else group
        for group, report in zip(ordered, reports, strict=True)
    ]
    return Completed(proved, reports, misses, [r for _, r in kept if r.status == "mixed"], trace.has_attention)


def infer(model: nn.Module, trace: Trace, known: Sequence[HeadGroup]) -> tuple[list[HeadGroup], dict[str, str]]:
    """Infer groups for projections that no known group claims.

    Returns:
        The groups, and {module name: reason} for attention calls without an inferred group.
    """
    taken = {(id(p), part) for g in known for p in g.parameters() for part in g.part}
    claimed = {_claim(part.parameter(), part.rows) for g in known for part in g.slices}
    parameters = {clean(name): p for name, p in model.named_parameters()}
    owners = {clean(name): (m, name) for name, m in model.named_modules()}
    groups: dict[str, HeadGroup] = {}
    misses: dict[str, str] = {}
    for call in trace.calls:
        if excluded := _excluded(call[0].owner, owners):
            misses.setdefault(*excluded)
            continue
        if any(role.mixed == CHANNELS for role in call):
            misses.setdefault(call[0].owner, CHANNELS)
            continue
        parts, reason = _parts(call)
        if reason:
            misses.setdefault(call[0].owner, reason)
        names = [x.key[0].rpartition(".")[0] for each in parts.values() for x in each]
        module = _ancestor([*names, call[0].owner])
        for part, each in parts.items():
            if any((id(parameters[x.key[0]]), part) in taken for x in each):
                continue  # this part is known; other inputs to it (frozen base weights, positions) are not heads
            each = _adapters_first([x for x in each if _belongs(x, module)])
            if mixed := next((role.mixed for role in call if role.role == part and role.mixed), ""):
                misses.setdefault(module, f"{part}: {mixed}")
                continue
            claims = {_claim(parameters[x.key[0]], x.rows) for x in each}
            if not each or claims <= claimed:  # q and k may share weights: keep one group
                continue
            claimed |= claims
            taken |= {(id(parameters[x.key[0]]), part) for x in each}
            slices = tuple(
                HeadSlice(owners[owner][0], attribute, x.key[0], x.rows, x.key[1])
                for x in each
                for owner, _, attribute in [x.key[0].rpartition(".")]
            )
            name = dotted(module, part)
            if name in groups or any(g.name == name for g in known):  # two attentions in one module
                name = dotted(each[0].key[0].rpartition(".")[0], part)
            place = where_of(model, owners[module][1])
            serves = each[0].serves if part == "q" else None
            groups[name] = HeadGroup(name, 0, part, place, stack_of(module), "inferred", slices, serves, "proved")
    # Another call may contradict the one that a group was inferred from.
    for report in check_groups(model, list(groups.values()), trace):
        if report.status == "wrong":
            misses[module_of(groups.pop(report.name))] = report.note
    return list(groups.values()), misses


def _without_single_streams(model: nn.Module, groups: Sequence[HeadGroup], trace: Trace) -> list[HeadGroup]:
    """Drop groups that claim only one stream of joint attention, such as the text of a text-and-image layer.

    If the values of a call come from several projections, a head consists of rows of all of them, and the trace infers
    it. Queries and keys alone do not show this: they may also depend on positions, which are not part of a head.
    """
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    partial: set[tuple[str, str]] = set()  # (parameter, part)
    for call in trace.calls:
        parts, _ = _parts(call)
        if len(_adapters_first(parts.get("v", []))) > 1:
            claimed = {(part, names.get(id(s.parameter()))) for g in groups for s in g.slices for part in g.part}
            for part, each in parts.items():
                wanted = {x.key[0] for x in _adapters_first(each) if x.rows.shape[0] > 1}
                known = {name for name in wanted if (part, name) in claimed}
                partial |= {(name, part) for name in known} if known != wanted else set()
    return [g for g in groups if not any((names.get(id(p)), g.part) in partial for p in g.parameters())]


def _claim(parameter: Tensor, rows: Tensor) -> tuple[int, tuple[int, ...]]:
    """Build a hashable key from a parameter and its claimed rows."""
    return id(parameter), tuple(sorted(rows.flatten().tolist()))


def _parts(call: Sequence[RoleGradients]) -> tuple[dict[str, list[_Split]], str]:
    """Split the projections of one attention call into heads: ({part: splits}, ""), or ({}, reason for failure)."""
    by_role = {name: [role for role in call if role.role == name] for name in ("q", "k", "v", "any")}
    first = next((r for name in ("q", "k") for r in by_role[name] if len(_heads(r)) > 1), None)
    if first is None or by_role["any"]:
        return {}, ""  # one head, or not attention over tokens
    ids = _head_ids(first)
    splits: dict[str, list[_Split]] = {}
    reasons: list[str] = []
    for name in ("q", "k", "v"):
        for role in by_role[name]:
            own = ids if len(ids) == _count(role) else _head_ids(role)
            for key, energy in role.energy.items():
                result = _split(key, energy, own, max(ids) + 1)
                if isinstance(result, str):
                    reasons.append(f"{name}: {key[0]}: {result}")
                else:
                    splits.setdefault(name, []).append(result)
    splits = {name: _main(each) for name, each in splits.items()}
    split = {name for name, each in splits.items() if any(x.rows.shape[0] > 1 for x in each)}
    if "q" in split and "k" in splits:
        serves = next((x.serves for x in splits["k"] if x.serves), None)
        heads, kv_heads = splits["q"][0].rows.shape[0], splits["k"][0].rows.shape[0]
        if serves is None and kv_heads < heads:  # the attention function repeats each kv head for neighbouring q heads
            serves = tuple(h * kv_heads // heads for h in range(heads))
        splits["q"] = [replace(x, serves=serves) for x in splits["q"]]
        return splits, ""
    if "k" in split and "q" not in split:
        rows = {x.rows.shape[1] for x in splits["k"]}
        if "v" in split:  # queries without a projection, such as learned ones
            if rows != {x.rows.shape[1] for x in splits["v"]}:
                why = "a head has another number of key rows than of value rows, so the softmax may not be over tokens"
                return {"v": splits["v"]}, why
            return {part: splits[part] for part in ("k", "v")}, ""
        return ({"v": splits["k"]}, "") if rows == {1} else ({"k": splits["k"]}, "")  # one score per head: additive
    return {}, "; ".join(reasons) or "the attention weights are not computed from queries and keys"


def _split(key: Key, energy: Tensor, ids: list[int], heads: int) -> _Split | str:
    """Split the rows of one projection into heads; return the reason as a string if they cannot be split."""
    mine = torch.zeros(max(ids) + 1, energy.shape[1], dtype=energy.dtype, device="cpu").index_add_(
        0, torch.tensor(ids, device="cpu"), energy
    )
    reached = mine > PRESENT * mine.max(1, keepdim=True).values.clamp(min=1e-300)  # [heads, rows]
    if len(reached) == 1:
        if heads > 1:
            return _Split(key, reached[0].nonzero().T.contiguous(), (0,) * heads)
        return "the call has one head"
    common = reached.all(0)
    own = reached & ~common  # [heads, rows]
    if not own.any():
        return _Split(key, common.nonzero().T.contiguous(), (0,) * heads)
    serves = same_head_ids(own)
    table = torch.stack([own[[n == i for n in serves]].any(0) for i in range(max(serves) + 1)])  # [M, rows]
    if int(table.sum(0).max()) > 1:
        return "heads share some of their rows"
    if len({int(n) for n in table.sum(1)}) > 1:
        return "heads differ in their number of rows"
    rows = torch.stack([features.nonzero().flatten() for features in table])  # [M, R]
    return _Split(key, rows, tuple(serves) if len(table) < len(serves) else None)


def _main(splits: list[_Split]) -> list[_Split]:
    """Keep projections that split into the most heads; drop per-head biases (one row per head) if there are others."""
    split = [x for x in splits if x.rows.shape[0] > 1] or splits
    wide = [x for x in split if x.rows.shape[1] > 1] or split
    most = max(x.rows.shape[0] for x in wide)
    return list({x.key: x for x in wide if x.rows.shape[0] == most}.values())


def _heads(role: RoleGradients) -> set[int]:
    return set(_head_ids(role))


def _head_ids(role: RoleGradients) -> list[int]:
    """Find the head number of each index of the call; all (sample, head) pairs of one head get the same number."""
    if not role.energy:
        return []
    return same_head_ids(torch.cat([e > PRESENT * e.max().clamp(min=1e-300) for e in role.energy.values()], 1))


def _count(role: RoleGradients) -> int:
    return next((len(e) for e in role.energy.values()), 0)


def _belongs(split: _Split, module: str) -> bool:
    """Check that a projection belongs to the attention module; a projection that all heads share must be inside it."""
    return split.rows.shape[0] > 1 or not module or split.key[0].startswith(f"{module}.")


def _excluded(path: str, owners: Mapping[str, tuple[nn.Module, str]]) -> tuple[str, str] | None:
    """Return (module, reason) if a call is inside a class that is listed as having no heads, else None."""
    steps = path.split(".")
    for length in range(len(steps), 0, -1):
        name = ".".join(steps[:length])
        kinds = kinds_of(owners[name][0]) if name in owners else []
        if reason := next((NO_HEADS[kind] for kind in kinds if kind in NO_HEADS), ""):
            return name, reason
    return None


def _adapters_first(splits: list[_Split]) -> list[_Split]:
    """Keep LoRA adapters instead of the frozen weights they adapt; keep all weights if there are no adapters."""
    return [x for x in splits if ".lora_B." in x.key[0]] or splits


def _ancestor(names: Sequence[str]) -> str:
    """Find the dotted name of the innermost module that contains all the named modules."""
    paths = [name.split(".") for name in names]
    same = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return ".".join(level[0] for level in same)


def _position(model: nn.Module, group: HeadGroup) -> tuple[int, int]:
    order = {clean(name): i for i, (name, _) in enumerate(model.named_modules())}
    return order.get(module_of(group), len(order)), "qkv".find(group.part)

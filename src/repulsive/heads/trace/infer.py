"""Read the heads of unknown attention classes off the trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from repulsive.errors import HeadLayoutError
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.place import clean, module_of, number_layers, stack_of, where_of
from repulsive.heads.table.families import NO_HEADS
from repulsive.heads.table.walk import dotted
from repulsive.heads.trace.check import HeadReport, judge
from repulsive.heads.trace.pairing import with_traced_pairs
from repulsive.heads.trace.reach import PRESENT, Key, Reach, Trace, alike
from repulsive.heads.trace.trace import trace_enough


@dataclass(frozen=True)
class Completed:
    """The table's groups and those the trace inferred in their place, in model order, with what the trace says of each.

    A report is "wrong" where the table is and the trace has nothing better; such a group must not be used.
    """

    groups: list[HeadGroup]
    reports: list[HeadReport]
    misses: dict[str, str]
    mixed: list[HeadReport]  # of groups that were left out, because something mixes their heads

    @property
    def untraced(self) -> list[str]:
        return [report.name for report in self.reports if report.status == "untraced"]

    @property
    def modules(self) -> set[str]:
        return {module_of(group) for group in self.groups}


@dataclass(frozen=True)
class _Found:
    key: Key
    rows: Tensor  # [M, R]
    serves: tuple[int, ...] | None


def complete(model: nn.Module, example_inputs: object, groups: Sequence[HeadGroup]) -> Completed:
    """Prove the table's groups on an example and infer what it does not know or gets wrong."""
    seen = trace_enough(model, example_inputs, lambda seen: settled(judge(model, groups, seen), seen))
    groups = with_traced_pairs(model, _without_halves(model, groups, seen), seen.calls)
    reports = judge(model, groups, seen)
    pairs = list(zip(groups, reports, strict=True))
    inferred, misses = infer(model, seen, [g for g, r in pairs if r.status not in ("wrong", "mixed")])
    better = {(id(p), g.part) for g in inferred for p in g.parameters()}
    kept = [
        (g, r) for g, r in pairs if r.status != "wrong" or not any((id(p), g.part) in better for p in g.parameters())
    ]
    kept += zip(inferred, judge(model, inferred, seen), strict=True)
    misses |= {module_of(g): f"{g.part}: {r.note}" for g, r in kept if r.status == "mixed"}
    both = sorted((pair for pair in kept if pair[1].status != "mixed"), key=lambda pair: _position(model, pair[0]))
    ordered = number_layers([g for g, _ in both], [module_of(g) for g, _ in both])
    ordered = with_traced_pairs(model, ordered, seen.calls)  # inferred kv heads may be numbered otherwise
    reports = [report for _, report in both]
    proved = [
        replace(group, proof="proved") if report.status == "verified" else group
        for group, report in zip(ordered, reports, strict=True)
    ]
    return Completed(proved, reports, misses, [r for _, r in kept if r.status == "mixed"])


def settled(reports: Sequence[HeadReport], seen: Trace) -> bool:
    """Has a trace of fewer samples shown all there is to see?"""
    asked = {reach.role for call in seen.calls for reach in call if reach.energy}
    return {"q", "k"} <= asked and all(report.status != "untraced" for report in reports)


def refuse_wrong(reports: Iterable[HeadReport]) -> None:
    """Raise for the first slice that is not one head.

    Raises:
        HeadLayoutError: with what the slice claims, where the gradient went and what to do.
    """
    for report in reports:
        if report.status in ("wrong", "mixed"):
            raise HeadLayoutError(
                f"{report.name}: {report.note}. The slice is not one head. Leave the layout to find_heads(model, "
                "example_inputs), give the right rows to heads_by_hand, or leave this part out"
            )


def infer(model: nn.Module, seen: Trace, known: Sequence[HeadGroup]) -> tuple[list[HeadGroup], dict[str, str]]:
    """Groups for projections that no known group claims, and {module: why not} for calls that stay unresolved."""
    taken = {(id(p), part) for g in known for p in g.parameters() for part in g.part}
    claimed = {_claim(part.parameter(), part.rows) for g in known for part in g.slices}
    parameters = {clean(name): p for name, p in model.named_parameters()}
    owners = {clean(name): (m, name) for name, m in model.named_modules()}
    groups: dict[str, HeadGroup] = {}
    misses: dict[str, str] = {}
    for call in seen.calls:
        if excluded := _excluded(call[0].owner, owners):
            misses.setdefault(*excluded)
            continue
        parts, reason = _parts(call)
        if reason:
            misses.setdefault(call[0].owner, reason)
        names = [found.key[0].rpartition(".")[0] for each in parts.values() for found in each]
        module = _ancestor([*names, call[0].owner])
        for part, each in parts.items():
            if any((id(parameters[x.key[0]]), part) in taken for x in each):
                continue  # this part of this call is known; what else feeds it (frozen base, positions) stays out
            each = _trained([x for x in each if _wanted(x, module)])
            if mixed := next((reach.mixed for reach in call if reach.role == part and reach.mixed), ""):
                misses.setdefault(module, f"{part}: {mixed}")
                continue
            claims = {_claim(parameters[x.key[0]], x.rows) for x in each}
            if not each or claims <= claimed:  # of weights that q and k share, one group is enough
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
    for report in judge(model, list(groups.values()), seen):  # another call may contradict what one call showed
        if report.status == "wrong":
            misses[module_of(groups.pop(report.name))] = report.note
    return list(groups.values()), misses


def _without_halves(model: nn.Module, groups: Sequence[HeadGroup], seen: Trace) -> list[HeadGroup]:
    """The groups less those of joint attention that claim one of its streams: the trace has both.

    Values of a call that come from several projections (of text and of pictures, say) make heads of all of them.
    Queries and keys may draw on more without that, on positions for instance, which belong to no head here.
    """
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    halves: set[tuple[str, str]] = set()  # (parameter, part)
    for call in seen.calls:
        parts, _ = _parts(call)
        if len(_trained(parts.get("v", []))) > 1:
            claimed = {(part, names.get(id(s.parameter()))) for g in groups for s in g.slices for part in g.part}
            for part, each in parts.items():
                wanted = {x.key[0] for x in _trained(each) if x.rows.shape[0] > 1}
                known = {name for name in wanted if (part, name) in claimed}
                halves |= {(name, part) for name in known} if known != wanted else set()
    return [g for g in groups if not any((names.get(id(p)), g.part) in halves for p in g.parameters())]


def _claim(parameter: Tensor, rows: Tensor) -> tuple[int, tuple[int, ...]]:
    """Which rows of which weight, whatever part they are."""
    return id(parameter), tuple(sorted(rows.flatten().tolist()))


def _parts(call: Sequence[Reach]) -> tuple[dict[str, list[_Found]], str]:
    """part -> the projections that split into heads, for one attention call."""
    by_role = {role: [reach for reach in call if reach.role == role] for role in ("q", "k", "v", "any")}
    first = next((r for role in ("q", "k") for r in by_role[role] if len(_heads(r)) > 1), None)
    if first is None or by_role["any"]:
        return {}, ""  # one head, or no attention at all: nothing can repel
    ids = _head_ids(first)
    found: dict[str, list[_Found]] = {}
    reasons: list[str] = []
    for role in ("q", "k", "v"):
        for reach in by_role[role]:
            own = ids if len(ids) == _count(reach) else _head_ids(reach)
            for key, energy in reach.energy.items():
                result = _split(key, energy, own, max(ids) + 1)
                if isinstance(result, str):
                    reasons.append(f"{role}: {key[0]}: {result}")
                else:
                    found.setdefault(role, []).append(result)
    found = {role: _main(each) for role, each in found.items()}
    split = {role for role, each in found.items() if any(x.rows.shape[0] > 1 for x in each)}
    if "q" in split and "k" in found:
        serves = next((x.serves for x in found["k"] if x.serves), None)
        heads, kv_heads = found["q"][0].rows.shape[0], found["k"][0].rows.shape[0]
        if serves is None and kv_heads < heads:  # the call repeats kv heads itself, each for its neighbours
            serves = tuple(h * kv_heads // heads for h in range(heads))
        found["q"] = [replace(x, serves=serves) for x in found["q"]]
        return found, ""
    if "k" in split and "q" not in split:
        rows = {x.rows.shape[1] for x in found["k"]}
        if "v" in split:  # queries that no projection makes: learned ones, say
            if rows != {x.rows.shape[1] for x in found["v"]}:
                why = "keys draw on another number of rows than values: the softmax may not be over tokens"
                return {"v": found["v"]}, why
            return {part: found[part] for part in ("k", "v")}, ""
        return ({"v": found["k"]}, "") if rows == {1} else ({"k": found["k"]}, "")  # one score per head: additive
    return {}, "; ".join(reasons) or "attention weights do not come from queries and keys"


def _split(key: Key, energy: Tensor, ids: list[int], heads: int) -> _Found | str:
    """Rows of one projection per head, or why it does not split."""
    mine = torch.zeros(max(ids) + 1, energy.shape[1], dtype=energy.dtype).index_add_(0, torch.tensor(ids), energy)
    reached = mine > PRESENT * mine.max(1, keepdim=True).values.clamp(min=1e-300)  # [heads, rows]
    if len(reached) == 1:
        if heads > 1:
            return _Found(key, reached[0].nonzero().T.contiguous(), (0,) * heads)
        return "the call has one head"
    common = reached.all(0)
    own = reached & ~common
    if not own.any():
        return _Found(key, common.nonzero().T.contiguous(), (0,) * heads)
    serves = alike(own)
    table = torch.stack([own[[n == i for n in serves]].any(0) for i in range(max(serves) + 1)])  # [M, rows]
    if int(table.sum(0).max()) > 1:
        return "heads overlap"
    if len({int(n) for n in table.sum(1)}) > 1:
        return "heads are of unequal size"
    rows = torch.stack([features.nonzero().flatten() for features in table])  # [M, R]
    return _Found(key, rows, tuple(serves) if len(table) < len(serves) else None)


def _main(found: list[_Found]) -> list[_Found]:
    """Projections that split, without per-head biases (one row a head) where there are real ones."""
    split = [x for x in found if x.rows.shape[0] > 1] or found
    wide = [x for x in split if x.rows.shape[1] > 1] or split
    most = max(x.rows.shape[0] for x in wide)
    return list({x.key: x for x in wide if x.rows.shape[0] == most}.values())


def _heads(reach: Reach) -> set[int]:
    return set(_head_ids(reach))


def _head_ids(reach: Reach) -> list[int]:
    """Number the call's indices by what they reach, so that (sample, head) pairs fall together: [indices]."""
    if not reach.energy:
        return []
    return alike(torch.cat([e > PRESENT * e.max().clamp(min=1e-300) for e in reach.energy.values()], 1))


def _count(reach: Reach) -> int:
    return next((len(e) for e in reach.energy.values()), 0)


def _wanted(found: _Found, module: str) -> bool:
    """A projection that all heads share is part of this attention only if it lives inside its module."""
    return found.rows.shape[0] > 1 or not module or found.key[0].startswith(f"{module}.")


def _excluded(path: str, owners: Mapping[str, tuple[nn.Module, str]]) -> tuple[str, str] | None:
    """(module, reason) if a call stands inside a class that is known to have no heads."""
    steps = path.split(".")
    for length in range(len(steps), 0, -1):
        name = ".".join(steps[:length])
        reason = NO_HEADS.get(type(owners[name][0]).__name__) if name in owners else None
        if reason:
            return name, reason
    return None


def _trained(found: list[_Found]) -> list[_Found]:
    """Of a LoRA adapter and the frozen weight under it, the adapter."""
    return [x for x in found if ".lora_B." in x.key[0]] or found


def _ancestor(names: Sequence[str]) -> str:
    """The innermost module that all of these are in."""
    paths = [name.split(".") for name in names]
    same = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return ".".join(level[0] for level in same)


def _position(model: nn.Module, group: HeadGroup) -> tuple[int, int]:
    order = {clean(name): i for i, (name, _) in enumerate(model.named_modules())}
    return order.get(module_of(group), len(order)), "qkv".find(group.part)

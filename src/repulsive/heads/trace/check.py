"""Is a claimed slice one head? Compare the table of rows with where the gradient went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.place import clean, module_of
from repulsive.heads.trace.pairing import head_energy, pairing_fault
from repulsive.heads.trace.reach import PRESENT, Key, Reach, Trace, alike

_ROLES = {"q": (("q", "any"), ("k",)), "k": (("k", "any"), ("q",)), "v": (("v", "any"), ("k", "q"))}


@dataclass(frozen=True)
class HeadReport:
    """What the trace says about one group.

    Args:
        name: the group's name.
        part: its part.
        num_heads: its number of heads.
        leak: largest share of a head's squared gradient that falls outside its slice; nan where untraced.
        status: "verified", "untraced", "wrong", or "mixed" where something mixes the heads with each other.
        note: what was held constant, left out, mixed or wrong.
    """

    name: str
    part: str
    num_heads: int
    leak: float
    status: str
    note: str = ""

    def __str__(self) -> str:
        leak = f", leak {self.leak:.1e}" if self.status in ("verified", "wrong") else ""
        return f"{self.name}: {self.num_heads} heads {self.status}{leak}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class _Verdict:
    leak: float
    fault: str
    note: str
    heads: int  # that the attention calls tell apart


def judge(model: nn.Module, groups: Sequence[HeadGroup], seen: Trace, tolerance: float = 1e-6) -> list[HeadReport]:
    """One report per group; a wrong slice is reported, not raised."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    serves = {module_of(g): g.serves for g in groups if g.serves is not None}
    return [_report(g, seen, names, serves.get(module_of(g)), tolerance) for g in groups]


def _report(
    group: HeadGroup,
    seen: Trace,
    names: Mapping[int, str],
    serves: tuple[int, ...] | None,
    tolerance: float,
) -> HeadReport:
    def report(leak: float, status: str, note: str) -> HeadReport:
        return HeadReport(group.name, group.part, group.num_heads, leak, status, note)

    reaches = [reach for call in seen.calls for reach in call]
    found: list[_Verdict] = []
    for s in group.slices:
        key = (names.get(id(s.parameter()), s.parameter_name), s.axis)
        asked = [reach for reach in reaches if reach.role in group.part and reach.mixed and group.num_heads > 1]
        if mixed := [reach.mixed for reach in asked if key in reach.energy]:
            return report(float("nan"), "mixed", mixed[0])
        verdicts = _verdicts(group, s, key, reaches, serves, tolerance)
        if not verdicts:
            if mixer := [reach.mixed for reach in asked if _related(reach.owner, module_of(group))]:
                return report(float("nan"), "mixed", mixer[0])
            if any(name == key[0] and axis != s.axis for reach in reaches for name, axis in reach.energy):
                fault = f"attention counts the heads of {s.parameter_name} along another axis than {s.axis}"
                return report(1.0, "wrong", fault)
            return report(float("nan"), "untraced", _why_untraced(s, module_of(group), seen))
        if faulty := [verdict for verdict in verdicts if verdict.fault]:
            return report(faulty[0].leak, "wrong", faulty[0].fault)
        found += verdicts
    leak = max(verdict.leak for verdict in found)
    if len(group.part) > 1:
        fault = pairing_fault(group, seen.calls, names)
        if (fewest := min(verdict.heads for verdict in found)) > group.num_heads:
            fault = f"every part has at least {fewest} heads in the attention call, not {group.num_heads}"
        if fault:
            return report(leak, "wrong", fault)
    return report(leak, "verified", "; ".join(dict.fromkeys(verdict.note for verdict in found if verdict.note)))


def _why_untraced(s: HeadSlice, module: str, seen: Trace) -> str:
    hidden = [why for name, why in seen.hidden.items() if _related(name, module)]
    return "; ".join([f"no attention call of the example reached {s.parameter_name}", *hidden[:1]])


def _verdicts(
    group: HeadGroup,
    s: HeadSlice,
    key: Key,
    reaches: list[Reach],
    serves: tuple[int, ...] | None,
    tolerance: float,
) -> list[_Verdict]:
    """One verdict for every role in which calls draw on this slice."""
    joined = len(group.part) > 1
    for other, roles in enumerate(_ROLES[group.part] if not joined else (("q", "k", "v", "any"),)):
        seen = [reach for reach in reaches if reach.role in roles and key in reach.energy]
        near = [reach for reach in seen if _related(reach.owner, module_of(group))] or seen
        verdicts = [
            _verdict(s, same, key, joined, None if group.part == "q" else serves, tolerance)
            for role in roles
            if (same := [reach for reach in near if reach.role == role])
        ]
        if joined:  # a packed weight answers to several roles; the slice belongs to the one it fits
            verdicts = sorted(verdicts, key=lambda verdict: verdict.leak)[:1]
        if other:  # a packed weight is also what the other parts draw on: then this part was not seen at all
            verdicts = [verdict for verdict in verdicts if verdict.leak <= tolerance]
        if verdicts:
            return verdicts
    return []


def _verdict(
    s: HeadSlice, reaches: list[Reach], key: Key, joined: bool, serves: tuple[int, ...] | None, tolerance: float
) -> _Verdict:
    energy = torch.cat([reach.energy[key] for reach in reaches])  # shared layers and split calls: all indices count
    energy = energy[energy.sum(1) > 0]  # [indices, rows of the parameter]; masked samples say nothing
    reached = energy > PRESENT * energy.max(1, keepdim=True).values
    claimed = torch.zeros(energy.shape[1], dtype=torch.bool)
    claimed[s.rows.flatten().cpu()] = True
    shared = reached.all(0) & ~claimed if s.num_heads > 1 else torch.zeros_like(claimed)
    total = energy[:, ~shared].sum(1)  # [indices]
    per_head = head_energy(s, energy)  # [indices, M]
    inside, head = per_head.max(1)
    leaks = torch.where(total > 0, 1 - inside / total.clamp(min=1e-300), 1.0).clamp(min=0)
    worst = int(leaks.argmax())
    leak = float(leaks[worst])
    order = list(dict.fromkeys(head.tolist()))
    actual = len(set(alike(reached & ~shared)))
    fault = ""
    if leak > tolerance:
        fault = (
            f"attention head {worst} draws on rows {spans(reached[worst].nonzero().flatten())} of "
            f"{s.parameter_name}; the closest slice, head {int(head[worst])} with rows {spans(s.rows[head[worst]])}, "
            f"misses {leak:.1%} of its gradient"
        )
    elif not joined and actual > s.num_heads:
        fault = f"{s.parameter_name} has {actual} heads in the attention call, not {s.num_heads}"
    elif idle := _idle(s, reached):
        fault = f"attention does not use rows {spans(idle)} of {s.parameter_name}, which the slice claims"
    elif order != list(range(s.num_heads)) and not (sorted(order) == list(range(s.num_heads)) and (joined or serves)):
        fault = f"heads of {s.parameter_name} come in the order {order} in the attention call"
    elif serves and not joined and not _serves(head.tolist(), serves):
        fault = f"kv heads of {s.parameter_name} serve the q heads as {head.tolist()}, not as {list(serves)}"
    return _Verdict(leak, fault, _note(s, reaches, int(shared.sum())), actual)


def _serves(head: list[int], serves: tuple[int, ...]) -> bool:
    """Does the call repeat kv heads as `serves` says? A call that leaves them unrepeated says nothing against it."""
    if len(head) % len(serves):
        return True
    return head == list(serves) * (len(head) // len(serves))


def _idle(s: HeadSlice, reached: Tensor) -> list[int]:
    """Claimed rows that no head draws on, where they are a good part of every head; [] otherwise."""
    idle = ~reached.any(0)[s.rows.cpu()]  # [M, R]
    return s.rows.cpu()[idle].tolist() if bool((10 * idle.sum(1) >= s.rows.shape[1]).all()) else []


def _note(s: HeadSlice, reaches: list[Reach], shared: int) -> str:
    notes = []
    if any(width > s.rows.shape[1] for reach in reaches for width in reach.held) and s.num_heads > 1:
        notes.append("norm over the full width held constant")
    if shared:
        notes.append(f"{shared} features shared by all heads left out")
    return "; ".join(notes)


def spans(rows: Tensor | list[int], most: int = 4) -> str:
    """Row numbers as "0-7, 16-23", cut short after a few."""
    numbers = sorted(rows.tolist() if isinstance(rows, Tensor) else rows)
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:most]]
    return ", ".join(words) + (f", ... ({len(runs)} runs)" if len(runs) > most else "")


def _related(owner: str, module: str) -> bool:
    return owner == module or owner.startswith(f"{module}.") or module.startswith(f"{owner}.") or not module

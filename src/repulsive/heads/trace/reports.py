"""Check claimed heads against a trace: compare the rows of each slice with the rows that gradients reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repulsive.errors import HeadLayoutError
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import clean, module_of
from repulsive.heads.trace.gradients import PRESENT, Key, RoleGradients, Trace, same_head_ids
from repulsive.heads.trace.pairing import head_energy, pairing_fault

_ROLES = {"q": (("q", "any"), ("k",)), "k": (("k", "any"), ("q",)), "v": (("v", "any"), ("k", "q"))}


@dataclass(frozen=True)
class HeadReport:
    """Result of checking one group against a trace.

    Args:
        name: the group's name.
        part: the group's projection part (q, k or v).
        num_heads: the group's number of heads.
        leak: largest share of a head's squared gradient that falls outside its slice; nan if untraced.
        status: "verified", "untraced" (no attention call reached the group), "wrong", or "mixed" (something mixes the
            heads with each other).
        note: what is wrong or mixed, or what the check excluded or held constant.
        has_norm: whether the model normalises the projected tokens before the attention call.
    """

    name: str
    part: str
    num_heads: int
    leak: float
    status: str
    note: str = ""
    has_norm: bool = False

    def __str__(self) -> str:
        leak = f", leak {self.leak:.1e}" if self.status in ("verified", "wrong") else ""
        return f"{self.name}: {self.num_heads} heads {self.status}{leak}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class _Verdict:
    leak: float
    fault: str
    note: str
    heads: int  # number of different heads in the attention calls
    has_norm: bool


def check_groups(
    model: nn.Module, groups: Sequence[HeadGroup], trace: Trace, tolerance: float = 1e-6
) -> list[HeadReport]:
    """Check each group against a trace and report wrong slices without raising an error.

    Args:
        model: the unwrapped model.
        groups: the groups to check.
        trace: a trace of the model.
        tolerance: largest share of a head's squared gradient that may fall outside its slice.
    """
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    serves = {module_of(g): g.serves for g in groups if g.serves is not None}
    return [_report(g, trace, names, serves.get(module_of(g)), tolerance) for g in groups]


def is_sufficient(reports: Sequence[HeadReport], trace: Trace) -> bool:
    """Check whether a trace of a few samples reached every group and found queries and keys."""
    roles = {role.role for call in trace.calls for role in call if role.energy}
    return {"q", "k"} <= roles and all(report.status != "untraced" for report in reports)


def refuse_wrong(reports: Iterable[HeadReport]) -> None:
    """Raise for the first group whose slices are not heads.

    Raises:
        HeadLayoutError: the message says what the slice claims, which rows attention uses and what to do.
    """
    for report in reports:
        if report.status in ("wrong", "mixed"):
            raise HeadLayoutError(
                f"{report.name}: {report.note}. The slice is not one head. Call find_heads(model, example_inputs) to "
                "infer the layout, pass the right rows to heads_by_hand, or exclude this part"
            )


def _report(
    group: HeadGroup,
    trace: Trace,
    names: Mapping[int, str],
    serves: tuple[int, ...] | None,
    tolerance: float,
) -> HeadReport:
    def report(leak: float, status: str, note: str) -> HeadReport:
        return HeadReport(group.name, group.part, group.num_heads, leak, status, note)

    gradients = [role for call in trace.calls for role in call]
    all_verdicts: list[_Verdict] = []
    for s in group.slices:
        key = (names.get(id(s.parameter()), s.parameter_name), s.axis)
        mixing = [role for role in gradients if role.role in group.part and role.mixed and group.num_heads > 1]
        if mixed := [role.mixed for role in mixing if key in role.energy]:
            return report(float("nan"), "mixed", mixed[0])
        verdicts = _verdicts(group, s, key, gradients, serves, tolerance)
        if not verdicts:
            if mixed := [role.mixed for role in mixing if _is_nested(role.owner, module_of(group))]:
                return report(float("nan"), "mixed", mixed[0])
            if any(name == key[0] and axis != s.axis for role in gradients for name, axis in role.energy):
                fault = f"attention splits {s.parameter_name} into heads along another axis than {s.axis}"
                return report(1.0, "wrong", fault)
            return report(float("nan"), "untraced", _why_untraced(s, module_of(group), trace))
        if faulty := [verdict for verdict in verdicts if verdict.fault]:
            return report(faulty[0].leak, "wrong", faulty[0].fault)
        all_verdicts += verdicts
    leak = max(verdict.leak for verdict in all_verdicts)
    if len(group.part) > 1:
        fault = pairing_fault(group, trace.calls, names)
        if (fewest := min(verdict.heads for verdict in all_verdicts)) > group.num_heads:
            fault = f"every part has at least {fewest} heads in the attention call, and the group has {group.num_heads}"
        if fault:
            return report(leak, "wrong", fault)
    note = "; ".join(dict.fromkeys(verdict.note for verdict in all_verdicts if verdict.note))
    has_norm = any(verdict.has_norm for verdict in all_verdicts)
    return HeadReport(group.name, group.part, group.num_heads, leak, "verified", note, has_norm)


def _why_untraced(s: HeadSlice, module: str, trace: Trace) -> str:
    hidden = [why for name, why in trace.hidden.items() if _is_nested(name, module)]
    return "; ".join([f"no attention call of the example reached {s.parameter_name}", *hidden[:1]])


def _verdicts(
    group: HeadGroup,
    s: HeadSlice,
    key: Key,
    gradients: list[RoleGradients],
    serves: tuple[int, ...] | None,
    tolerance: float,
) -> list[_Verdict]:
    """Judge the slice once for every role (q, k or v) in which attention calls use it."""
    is_joined = len(group.part) > 1
    for is_other, roles in enumerate(_ROLES[group.part] if not is_joined else (("q", "k", "v", "any"),)):
        using = [role for role in gradients if role.role in roles and key in role.energy]
        near = [role for role in using if _is_nested(role.owner, module_of(group))] or using
        verdicts = [
            _verdict(s, same, key, is_joined, None if group.part == "q" else serves, tolerance)
            for name in roles
            if (same := [role for role in near if role.role == name])
        ]
        if is_joined:  # several roles may use a packed weight; the slice belongs to the role it fits best
            verdicts = sorted(verdicts, key=lambda verdict: verdict.leak)[:1]
        if is_other:  # other parts use a packed weight too: without a fit, this part was not traced
            verdicts = [verdict for verdict in verdicts if verdict.leak <= tolerance]
        if verdicts:
            return verdicts
    return []


def _verdict(
    s: HeadSlice,
    gradients: list[RoleGradients],
    key: Key,
    is_joined: bool,
    serves: tuple[int, ...] | None,
    tolerance: float,
) -> _Verdict:
    energy = torch.cat([role.energy[key] for role in gradients])  # a layer may be called several times, or a call split
    energy = energy[energy.sum(1) > 0]  # [indices, rows of the parameter]; masked samples reach no row
    reached = energy > PRESENT * energy.max(1, keepdim=True).values
    claimed = torch.zeros(energy.shape[1], dtype=torch.bool, device="cpu")
    claimed[s.rows.flatten().cpu()] = True
    shared = reached.all(0) & ~claimed if s.num_heads > 1 else torch.zeros_like(claimed)
    total = energy[:, ~shared].sum(1)  # [indices]
    per_head = head_energy(s, energy)  # [indices, M]
    inside, head = per_head.max(1)
    leaks = torch.where(total > 0, 1 - inside / total.clamp(min=1e-300), 1.0).clamp(min=0)
    worst = int(leaks.argmax())
    leak = float(leaks[worst])
    order = list(dict.fromkeys(head.tolist()))
    actual = len(set(same_head_ids(reached & ~shared)))
    fault = ""
    if leak > tolerance:
        fault = (
            f"attention head {worst} uses rows {format_rows(reached[worst].nonzero().flatten())} of "
            f"{s.parameter_name}; the closest slice, head {int(head[worst])} with rows "
            f"{format_rows(s.rows[head[worst]])}, misses {leak:.1%} of its gradient"
        )
    elif not is_joined and actual > s.num_heads:
        fault = f"{s.parameter_name} has {actual} heads in the attention call, and the slice has {s.num_heads}"
    elif unused := _unused(s, reached):
        fault = f"attention does not use rows {format_rows(unused)} of {s.parameter_name}, which the slice claims"
    elif order != list(range(s.num_heads)) and not (
        sorted(order) == list(range(s.num_heads)) and (is_joined or serves)
    ):
        fault = f"the attention call orders the heads of {s.parameter_name} as {order}"
    elif serves and not is_joined and not _is_served_as(head.tolist(), serves):
        fault = f"kv heads of {s.parameter_name} serve the q heads as {head.tolist()}, not as {list(serves)}"
    has_norm = any(role.norm_widths for role in gradients)
    return _Verdict(leak, fault, _note(s, gradients, int(shared.sum())), actual, has_norm)


def _is_served_as(head: list[int], serves: tuple[int, ...]) -> bool:
    """Check whether the call repeats kv heads as `serves` says; a call that does not repeat them passes."""
    if len(head) % len(serves):
        return True
    return head == list(serves) * (len(head) // len(serves))


def _unused(s: HeadSlice, reached: Tensor) -> list[int]:
    """Find claimed rows that no attention head uses, if they are at least a tenth of every head; [] otherwise."""
    unused = ~reached.any(0)[s.rows.cpu()]  # [M, R]
    return s.rows.cpu()[unused].tolist() if bool((10 * unused.sum(1) >= s.rows.shape[1]).all()) else []


def _note(s: HeadSlice, gradients: list[RoleGradients], shared: int) -> str:
    notes = []
    if any(width > s.rows.shape[1] for role in gradients for width in role.norm_widths) and s.num_heads > 1:
        notes.append("norm over the full width held constant")
    if shared:
        notes.append(f"{shared} features shared by all heads excluded")
    return "; ".join(notes)


def format_rows(rows: Tensor | list[int], most: int = 4) -> str:
    """Format row numbers as "0-7, 16-23", with at most `most` ranges."""
    numbers = sorted(rows.tolist() if isinstance(rows, Tensor) else rows)
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:most]]
    return ", ".join(texts) + (f", ... ({len(runs)} runs)" if len(runs) > most else "")


def _is_nested(owner: str, module: str) -> bool:
    """Check whether two modules are the same or one is inside the other."""
    return owner == module or owner.startswith(f"{module}.") or module.startswith(f"{owner}.") or not module

"""Decide in which optimizer steps the force is recomputed.

Early in training heads move fast, and a force is out of date after a few steps; later it changes slowly. Therefore
`every="auto"` recomputes it in every step at first, and never uses a force older than 2 % of the steps so far. The
force is computed 346 times in the first 10,000 steps.
"""

from __future__ import annotations

from bisect import bisect_left

OLDEST = 50  # a force is recomputed after 1 / OLDEST of the steps so far

_due = [0]  # steps with a new force for every="auto"; extended as needed


def is_renewed(step: int, every: int | str, act_every: int = 1) -> bool:
    """Check whether a step computes a new force. The result depends only on the step, so a resumed run is identical.

    Args:
        step: number of optimizer steps taken so far.
        every: number of steps between two forces, or "auto".
        act_every: the rule acts in one of this many steps; a force that is due in between is computed in the next.

    Example:
        >>> [step for step in range(95, 110) if is_renewed(step, "auto")]
        [95, 96, 97, 98, 99, 100, 102, 104, 106, 108]
    """
    if act_every > 1:
        return step % act_every == 0 and any(is_renewed(step - past, every) for past in range(min(act_every, step + 1)))
    if isinstance(every, int):
        return step % every == 0
    while _due[-1] < step:
        _due.append(_due[-1] + max(1, _due[-1] // OLDEST))
    return _due[bisect_left(_due, step)] == step

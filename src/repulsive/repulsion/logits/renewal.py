"""In which optimizer steps the force is computed anew.

Early in training heads move fast and a force is out of date after a few steps; later it changes slowly and matters
less. `every="auto"` therefore renews it in every step at first, and never uses one that is older than 2 % of the
training so far: 346 renewals in the first 10,000 steps.
"""

from __future__ import annotations

from bisect import bisect_left

OLDEST = 50  # a force is renewed after 1 / OLDEST of the steps so far

_due = [0]  # steps with a new force under every="auto"; grows as needed


def is_renewed(step: int, every: int | str) -> bool:
    """Whether a step computes a new force; it depends on the step alone, so that a resumed run agrees.

    Args:
        step: optimizer steps taken so far.
        every: a number of steps, or "auto".

    Example:
        >>> [step for step in range(95, 110) if is_renewed(step, "auto")]
        [95, 96, 97, 98, 99, 100, 102, 104, 106, 108]
    """
    if isinstance(every, int):
        return step % every == 0
    while _due[-1] < step:
        _due.append(_due[-1] + max(1, _due[-1] // OLDEST))
    return _due[bisect_left(_due, step)] == step

"""Apply rules to the gradients of heads, at most once per optimizer step that updates parameters."""

from repulsive.particles.schedules import Constant, Cosine, Linear, Until, WarmUp
from repulsive.repulsion.attach import repel, unwrap_optimizer
from repulsive.repulsion.handle import Handle
from repulsive.repulsion.measurements import GroupReport
from repulsive.repulsion.second_moment import fix_second_moment
from repulsive.repulsion.sharding.placement import head_placement

__all__ = [
    "Constant",
    "Cosine",
    "GroupReport",
    "Handle",
    "Linear",
    "Until",
    "WarmUp",
    "fix_second_moment",
    "head_placement",
    "repel",
    "unwrap_optimizer",
]

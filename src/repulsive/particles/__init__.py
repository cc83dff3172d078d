"""Rules: turn particles [..., M, D] and their loss gradients into the gradients that the optimizer descends."""

from repulsive.particles.collapse import CollapsedHeads
from repulsive.particles.function_space import function_repulsion
from repulsive.particles.kernel_free import KernelFree
from repulsive.particles.kernels import IMQ, RBF, Cosine, Hinge, Kernel
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.named import RULES, RuleName, rule_by_name
from repulsive.particles.priors import Gaussian, Uniform
from repulsive.particles.rule import Rule
from repulsive.particles.sgld import SGLD
from repulsive.particles.spos import SPOS
from repulsive.particles.svgd import SVGD

__all__ = [
    "IMQ",
    "RBF",
    "RULES",
    "SGLD",
    "SPOS",
    "SVGD",
    "CollapsedHeads",
    "Cosine",
    "CosineLadder",
    "Gaussian",
    "Hinge",
    "Kernel",
    "KernelFree",
    "Rule",
    "RuleName",
    "Uniform",
    "function_repulsion",
    "rule_by_name",
]

"""The baselines: penalties on attention that are added to the loss. Tensors in, one number out."""

from repulsive.regularizers.cosine import cosine
from repulsive.regularizers.disagreement import on_outputs, on_positions, on_subspaces
from repulsive.regularizers.frobenius import frobenius

__all__ = ["cosine", "frobenius", "on_outputs", "on_positions", "on_subspaces"]

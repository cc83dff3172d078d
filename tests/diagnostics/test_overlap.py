"""Overlap of the attention of heads."""

import torch

from repulsive.diagnostics.overlap import head_overlap
from repulsive.metrics.classification import overlap


def test_overlap_by_hand_and_against_the_metric():
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]).double()
    matrix = head_overlap(weights)
    assert matrix.tolist() == [[1.0, 0.5, 0.0], [0.5, 1.0, 0.5], [0.0, 0.5, 1.0]]
    i, j = torch.triu_indices(3, 3, 1)
    torch.testing.assert_close(matrix[i, j].mean(), overlap(weights.unsqueeze(0)))

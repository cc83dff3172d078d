"""Changes of W_Q and W_K that leave a model's function unchanged also leave the inner products of its logits unchanged.

One matrix R for each key head: W_Q -> R W_Q, W_K -> R^{-T} W_K. With rotary positions R must commute with their
rotations: it rotates and scales each pair of features that they rotate. With a norm on q and k R must also be
orthogonal.
"""

import math

import pytest
import torch
from torch import Tensor

from repulsive import SVGD, repel
from repulsive.repulsion.logits.force import logit_forces
from tests.repulsion.logits.models import CASES, Case

HALVES, NEIGHBOURS = "halves", "neighbours"  # rotary positions rotate features (a, a + d / 2), or (2 a, 2 a + 1)


def products_and_output(case: Case) -> tuple[Tensor, Tensor]:
    """Inner products of the logits of the heads [M, M], and the output of the model."""
    model = case.model.train()
    rule = SVGD("heads", 0.1, space="logits", tokens=10_000)
    handle = repel(model, torch.optim.AdamW(model.parameters()), rule, match=case.match, verbose=False)
    output = case.call()
    force = logit_forces(handle._logits.layers, handle._logits.sampler.samples, rule)[0]
    return force.numbers._products[force.row], output.detach()


def commuting(width: int, planes: str, scales: Tensor, angles: Tensor) -> Tensor:
    """A matrix [d, d] that scales and rotates each pair of features that rotary positions rotate."""
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for a, (scale, angle) in enumerate(zip(scales.tolist(), angles.tolist(), strict=True)):
        i, j = (a, a + width // 2) if planes == HALVES else (2 * a, 2 * a + 1)
        c, s = scale * math.cos(angle), scale * math.sin(angle)
        matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = c, -s, s, c
    return matrix


def transform(case: Case, matrices: list[Tensor]) -> None:
    """Apply one R per key head to its weights, and to those of the query heads that read it."""
    a = case.attention
    q, k = (p.weight.data.view(-1, matrices[0].shape[0], p.weight.shape[1]) for p in (a.q_proj, a.k_proj))
    for head, reads in enumerate(case.reads):
        q[head] = matrices[reads] @ q[head]
    for head, matrix in enumerate(matrices):
        k[head] = torch.linalg.inv(matrix).T @ k[head]


def changes(name: str, make_matrix, prepare=lambda case: None) -> tuple[float, float]:
    """Relative changes of the inner products and of the model's output under one random R per key head."""
    results = []
    for is_changed in (False, True):
        torch.manual_seed(0)
        case = CASES[name]()
        case.attention.q_proj.weight.data.mul_(100)  # the logits of a new model are almost zero
        prepare(case)
        if is_changed:
            transform(case, [make_matrix() for _ in range(2)])
        results.append(products_and_output(case))
    (products, output), (new_products, new_output) = results
    return (
        float((new_products - products).norm() / products.norm()),
        float((new_output - output).norm() / output.norm()),
    )


def random_commuting(width: int, planes: str, *, is_orthogonal: bool) -> Tensor:
    scales = torch.ones(width // 2) if is_orthogonal else torch.rand(width // 2) + 0.5
    return commuting(width, planes, scales, 2 * math.pi * torch.rand(width // 2))


def random_orthogonal(width: int) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q


def set_norms_to_one(case: Case) -> None:
    for norm in (case.attention.q_norm, case.attention.k_norm):
        norm.weight.data.fill_(1)


def test_rotary_positions_keep_scaled_rotations():
    products, output = changes("llama", lambda: random_commuting(4, HALVES, is_orthogonal=False))
    assert products < 1e-12 and output < 1e-7  # positions are computed in single precision


def test_any_matrix_keeps_the_products_at_distance_zero_and_changes_the_model():
    products, output = changes("llama", lambda: torch.randn(4, 4, dtype=torch.float64))
    assert products < 1e-10 and output > 1e-3


@pytest.mark.parametrize(
    ("name", "width", "planes", "prepare"),
    [("llama4", 4, NEIGHBOURS, lambda case: None), ("qwen3", 6, HALVES, set_norms_to_one)],
)
def test_a_norm_without_weights_keeps_rotations(name, width, planes, prepare):
    rotations = changes(name, lambda: random_commuting(width, planes, is_orthogonal=True), prepare)
    assert rotations[0] < 1e-12 and rotations[1] < 1e-6
    products, output = changes(name, lambda: random_orthogonal(width), prepare)
    assert products < 1e-12 and output > 1e-3  # the norm allows it, but rotary positions do not
    products, output = changes(name, lambda: random_commuting(width, planes, is_orthogonal=False), prepare)
    assert products > 1e-3 and output > 1e-3  # rotary positions allow it, but the norm does not


def test_a_norm_with_weights_keeps_signs_of_planes_only():
    def signs() -> Tensor:
        return commuting(6, HALVES, torch.ones(3), math.pi * torch.randint(0, 2, (3,)).double())

    products, output = changes("qwen3", signs)
    assert products < 1e-12 and output < 1e-7
    products, output = changes("qwen3", lambda: random_commuting(6, HALVES, is_orthogonal=True))
    assert products > 1e-3 and output > 1e-3

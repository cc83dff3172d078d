"""Each penalty against its definition as a double loop, and against what it is meant to do."""

import pytest
import torch

from repulsive.particles import CosineLadder
from repulsive.regularizers import cosine, frobenius, on_outputs, on_positions, on_subspaces


def test_frobenius():
    torch.manual_seed(0)
    a = torch.rand(2, 4, 6).double().softmax(-1)
    expected = sum(((x @ x.T - torch.eye(4).double()) ** 2).sum() for x in a) / 2
    assert torch.allclose(frobenius(a), expected)
    one_word = torch.zeros(1, 30, 9)
    one_word[..., 3] = 1
    assert frobenius(one_word) == 870
    apart = torch.eye(4)[None]
    assert frobenius(apart) == 0
    both = torch.stack([one_word[0, :4, :4], apart[0]])
    assert frobenius(both, torch.tensor([False, True])) == 0
    assert frobenius(both, torch.tensor([False, False])) == 0


def test_frobenius_is_blind_to_what_does_not_count():
    torch.manual_seed(0)
    a = torch.rand(3, 2, 4, 6).double().softmax(-1)  # of three sentences with two queries
    counts = torch.tensor([[True, False], [False, False], [True, True]])
    a[1, 0] = torch.nan  # a softmax over nothing
    a.requires_grad_()
    penalty = frobenius(a, counts)
    penalty.backward()
    assert torch.allclose(penalty, frobenius(a.detach()[counts]))
    assert a.grad.isfinite().all() and not a.grad[~counts].any() and a.grad[counts].any()


def test_disagreement_of_outputs_and_values():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4).double()
    total = 0.0
    for b in range(2):
        for t in range(5):
            for i in range(3):
                for j in range(3):
                    total += torch.cosine_similarity(x[b, i, t], x[b, j, t], dim=0) / 9
    assert torch.allclose(on_outputs(x), total / 10)
    assert torch.equal(on_outputs(x), on_subspaces(x))
    assert torch.allclose(on_outputs(x[:, :1].expand(-1, 3, -1, -1)), torch.ones(()).double())


def test_disagreement_of_positions():
    torch.manual_seed(0)
    a = torch.rand(2, 3, 5, 6).double().softmax(-1)
    total = sum((a[:, i] * a[:, j]).sum() for i in range(3) for j in range(3)) / 9 / 10
    assert torch.allclose(on_positions(a), total)


def test_padding_does_not_count():
    torch.manual_seed(0)
    x, a = torch.randn(2, 3, 5, 4).double(), torch.rand(2, 3, 5, 6).double().softmax(-1)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    for penalty, seen in ((on_outputs, x), (on_subspaces, x), (on_positions, a)):
        expected = (5 * penalty(seen[:1]) + 2 * penalty(seen[1:, :, :2])) / 7
        assert torch.allclose(penalty(seen, real), expected)
        broken = seen.clone()
        broken[1, :, 2:] = float("nan")
        broken.requires_grad_()
        loss = penalty(broken, real)
        loss.backward()
        assert torch.allclose(loss, expected)
        assert broken.grad.isfinite().all() and broken.grad[1, :, :2].any() and not broken.grad[1, :, 2:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("penalty", "shape"), [(on_outputs, (2, 3, 5, 8)), (on_subspaces, (2, 3, 5, 8)), (cosine, (3, 8))]
)
def test_zero_and_large_vectors(penalty, shape, dtype):
    """A zero vector used to receive a gradient of 1e11 in float32, and NaN in float16."""
    torch.manual_seed(0)
    x = (3e4 * torch.randn(shape)).clamp(-6e4, 6e4).to(dtype)  # the norm is too large for float16
    (x[:, 1] if penalty is not cosine else x[1]).zero_()
    known = penalty(x.double())
    x.requires_grad_()
    loss = penalty(x)
    loss.backward()
    zero = x.grad[:, 1] if penalty is not cosine else x.grad[1]
    assert torch.allclose(loss.double(), known, rtol=1e-5)
    assert x.grad.isfinite().all() and not zero.any()


def test_descending_a_penalty_makes_heads_less_alike():
    for penalty, shape in ((on_outputs, (2, 3, 5, 4)), (cosine, (4, 10))):
        torch.manual_seed(0)
        x = (torch.randn(shape) + 1).requires_grad_()
        (slope,) = torch.autograd.grad(penalty(x), x)
        assert penalty(x - 0.1 * slope) < penalty(x)


def test_the_cosine_penalty_is_the_ladders_first_rung():
    torch.manual_seed(0)
    theta = torch.randn(4, 10).double().requires_grad_()
    (slope,) = torch.autograd.grad(cosine(theta), theta)
    rung = CosineLadder(1.0, 1.0).gradient(theta.detach(), torch.zeros(4, 10).double())
    assert torch.allclose(slope, 2 * rung)

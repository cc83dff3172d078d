"""Inner products of heads as functions: against all pairs of tokens, and under the symmetries of logits."""

import pytest
import torch

from repulsive import SVGD
from repulsive.errors import RuleError
from repulsive.particles.logits import Circuits, are_parallel, centre_keys, cosines, function_gram, mean_and_largest

READS = (0, 0, 1, 1)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logits(q: torch.Tensor, k: torch.Tensor, reads: tuple[int, ...]) -> torch.Tensor:
    """Logits of all heads for all pairs of tokens, [M, N, N']."""
    return torch.stack([torch.stack([k[:, kv] @ x[i] for x in q]) for i, kv in enumerate(reads)])


def test_products_are_those_of_all_pairs_of_tokens():
    q, k = drawn(7, 4, 3), drawn(5, 2, 3, seed=1)
    flat = logits(q, k, READS).flatten(1)
    found = Circuits(q, k, right_of=READS).products()
    torch.testing.assert_close(found, flat @ flat.T / 35, rtol=1e-12, atol=1e-12)


def test_the_pulled_back_force_is_the_gradient():
    q, k = drawn(7, 4, 3).requires_grad_(), drawn(5, 2, 3, seed=1).requires_grad_()
    matrix = drawn(4, 4, seed=2)
    flat = logits(q, k, READS).flatten(1)
    energy = (matrix * (flat @ flat.detach().T)).sum() / 35
    expected = torch.autograd.grad(energy, (q, k))
    found = Circuits(q.detach(), k.detach(), right_of=READS).pull_back(matrix)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_an_invertible_map_between_q_and_k_changes_nothing():
    q, k, maps = drawn(20, 4, 3), drawn(20, 2, 3, seed=1), drawn(2, 3, 3, seed=2)
    turned_q = torch.einsum("nia,iab->nib", q, maps[list(READS)])
    turned_k = torch.einsum("nja,jab->njb", k, torch.linalg.inv(maps).mT)
    before, after = (Circuits(a, b, right_of=READS).products() for a, b in ((q, k), (turned_q, turned_k)))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def test_permuting_heads_permutes_products_and_force():
    q, k, order = drawn(20, 4, 3), drawn(20, 4, 3, seed=1), [2, 0, 3, 1]
    rule = SVGD(space="logits")
    results = []
    for one in (Circuits(q, k), Circuits(q[:, order], k[:, order])):
        products = one.products()
        results.append((products, *one.pull_back(rule.interact(function_gram(products)).repulsion)))
    torch.testing.assert_close(results[1][0], results[0][0][order][:, order])
    for found, before in zip(results[1][1:], results[0][1:], strict=True):
        torch.testing.assert_close(found, before[:, order], rtol=1e-9, atol=1e-12)


def test_similarity_and_force_ignore_the_size_of_logits():
    q, k = drawn(20, 4, 3), drawn(20, 4, 3, seed=1)
    scales = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64).view(1, 4, 1)
    torch.testing.assert_close(cosines(Circuits(q * scales, k).products()), cosines(Circuits(q, k).products()))
    circuits = Circuits(q, k)
    force_q, _ = circuits.pull_back(SVGD(space="logits").interact(function_gram(circuits.products())).repulsion)
    along = (force_q * q).sum((0, 2))  # the direction that only changes the size of a head's logits
    assert float(along.abs().max()) < 1e-10 * float(force_q.norm() * q.norm())


def test_keys_are_centred_within_their_sequence():
    keys, weights = drawn(2, 5, 3, 4), torch.ones(2, 5)
    weights[0, 3:] = 0
    found = centre_keys(keys, weights)
    torch.testing.assert_close(found[0, :3], keys[0, :3] - keys[0, :3].mean(0))
    assert float(found[0, 3:].abs().max()) == 0
    torch.testing.assert_close(found[1], centre_keys(keys)[1])


def test_the_largest_cosine_shows_duplicates_that_the_mean_hides():
    q, k = drawn(20, 1, 3), drawn(20, 1, 3, seed=1)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64).view(1, 4, 1)
    mean, largest = mean_and_largest(cosines(Circuits(q * signs, k.expand(-1, 4, -1)).products()))
    assert float(mean) == pytest.approx(-1 / 3)
    assert float(largest) == pytest.approx(1)


def test_a_head_with_zero_logits_has_cosine_zero_with_all_others():
    q, k = drawn(20, 3, 4), drawn(20, 3, 4, seed=1)
    q[:, 0] = 0
    similarity = cosines(Circuits(q, k).products())
    assert float(similarity[0].abs().max()) == 0 and bool(similarity.isfinite().all())


@pytest.mark.parametrize("size", [1e-24, 1.0, 1e12])
def test_parallel_functions_of_any_size(size):
    unit = torch.nn.functional.normalize(drawn(1, 50), dim=1)
    near = unit + 0.01 * drawn(4, 50)
    sizes = torch.tensor([[1.0], [-2.0], [0.0], [3.0]], dtype=unit.dtype)
    functions = torch.stack([sizes * unit, near, torch.zeros_like(near)]).float() * size**0.5
    assert are_parallel(functions @ functions.mT).tolist() == [True, False, True]


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(RuleError, match="must be equal"):
        Circuits(drawn(5, 4, 3), drawn(5, 4, 2))
    with pytest.raises(RuleError, match="give left_of or right_of"):
        Circuits(drawn(5, 4, 3), drawn(5, 2, 3))

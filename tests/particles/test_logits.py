"""Inner products of heads as functions: against all pairs of tokens, and under the symmetries of logits."""

import pytest
import torch

from repulsive import SVGD
from repulsive.errors import RuleError
from repulsive.particles.logits import Circuits, centre_keys, cosines, function_gram, mean_and_largest

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


@pytest.mark.parametrize("reads", [None, (0, 0, 1, 1)])
@pytest.mark.parametrize("kernel", ["rbf", "cosine", "hinge"])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_the_force_of_nearly_parallel_heads_is_not_a_rounding_error(size, kernel, reads):
    """Also with heads of very different norms, where errors of large ones would exceed the force on small ones."""
    for apart, is_none in ((0.0, True), (1e-5, False), (1e-3, False)):
        heads = 4 if reads is None else 2
        lengths = torch.tensor([1.0, -30.0, 0.2, 3.0], dtype=torch.float64)
        q = size * lengths[:, None] * (drawn(60, 1, 8) + apart * drawn(60, 4, 8, seed=1))
        k = lengths[:heads, None] * (drawn(50, 1, 8, seed=2) + apart * drawn(50, heads, 8, seed=3))
        circuits = Circuits(q.float(), k.float(), right_of=reads)
        moments = circuits.moments()
        matrix = SVGD(kernel=kernel, space="logits").interact(function_gram(circuits.products())).repulsion
        forces = circuits.pull_back(matrix, moments)
        error = 32 * torch.finfo(torch.float32).eps
        assert bool(circuits.are_rounding_errors(forces, matrix, moments, error)) is is_none, apart


def test_a_key_that_heads_share_may_have_the_rounding_errors_of_all_of_them():
    """Four equal heads with one key: the force on it is a sum over heads, so four times as much is a rounding error."""
    q, k = drawn(20, 1, 3).expand(-1, 4, -1), drawn(20, 1, 3, seed=1)
    matrix, error = torch.ones(4, 4, dtype=torch.float64), 1e-6

    def largest(circuits: Circuits) -> float:
        """Length of the force on key 0 from which on it is more than a rounding error."""
        moments, low, high = circuits.moments(), 0.0, 1.0
        for _ in range(50):
            middle, force = (low + high) / 2, torch.zeros_like(circuits.right)
            force[0, 0, 0] = middle
            is_error = circuits.are_rounding_errors((torch.zeros_like(q), force), matrix, moments, error)
            low, high = (middle, high) if is_error else (low, middle)
        return low

    apart, shared = Circuits(q, k.expand(-1, 4, -1)), Circuits(q, k, right_of=(0, 0, 0, 0))
    assert largest(shared) == pytest.approx(4 * largest(apart)) and largest(apart) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bandwidth_of_functions_stays_above_rounding_errors(dtype):
    """Unit functions closer than 4 sqrt(eps) cannot be told apart by their products."""
    products = torch.ones(4, 4, dtype=dtype)
    h = SVGD(space="logits").interact(function_gram(products)).bandwidth
    assert float(h) == pytest.approx(max(16 * torch.finfo(dtype).eps, 1e-8))


def test_products_that_are_not_symmetric_keep_the_digits_of_small_functions():
    """Products in float32 differ in their last digit from those with the two heads exchanged."""
    products = torch.tensor([[1e8, 1e4], [1e4 * (1 + 1e-6), 1.0]], dtype=torch.float64)
    torch.testing.assert_close(function_gram(products).inner, (products + products.mT) / 2, rtol=1e-7, atol=0)


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(RuleError, match="must be equal"):
        Circuits(drawn(5, 4, 3), drawn(5, 4, 2))
    with pytest.raises(RuleError, match="give left_of or right_of"):
        Circuits(drawn(5, 4, 3), drawn(5, 2, 3))

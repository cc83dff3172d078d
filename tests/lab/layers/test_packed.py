"""Sentences end to end: the reference against loops, the kernels against the reference, models against padding."""

import math

import pytest
import torch

from repulsive.lab.layers import packed
from repulsive.lab.layers.packed import Packed
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def by_loops(q, k, v, q_lengths, k_lengths, causal):
    out = torch.zeros_like(q)
    a = b = 0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        for head in range(q.shape[1]):
            for i in range(n):
                end = b + (min(i + 1, m) if causal else m)
                if end == b:
                    continue
                scores = torch.stack([q[a + i, head] @ k[j, head] for j in range(b, end)]) / math.sqrt(q.shape[2])
                out[a + i, head] = scores.softmax(0) @ v[b:end, head]
        a, b = a + n, b + m
    return out


CASES = [
    ([3, 1, 5], [3, 1, 5], True, 0),
    ([3, 1, 5], [2, 4, 1], False, 3),
    ([2, 0, 4, 1], [1, 3, 0, 2], False, 1),
    ([4], [4], True, 40),
]


def attend(q, k, v, queries, keys, causal):
    if causal:
        return packed.attend(torch.stack([q, k, v], 1), queries, causal)
    return packed.attend_to(q, torch.stack([k, v], 1), queries, keys)


def sides(q_lengths, k_lengths, behind, device="cpu"):
    return tuple(
        Packed.of(torch.tensor(lengths, device=device), sum(lengths) + behind) for lengths in (q_lengths, k_lengths)
    )


def random(rows, heads, dim, dtype, device="cpu"):
    return torch.randn(rows, heads, dim, dtype=torch.float64).to(device, dtype).requires_grad_()


@pytest.mark.parametrize(("q_lengths", "k_lengths", "causal", "behind"), CASES)
def test_the_reference_is_what_loops_compute(q_lengths, k_lengths, causal, behind):
    torch.manual_seed(0)
    queries, keys = sides(q_lengths, k_lengths, behind)
    q, k, v = (random(len(side.places), 2, 3, torch.float64) for side in (queries, keys, keys))
    found = attend(q, k, v, queries, keys, causal)
    torch.testing.assert_close(found, by_loops(q, k, v, q_lengths, k_lengths, causal))
    assert (found[sum(q_lengths) :] == 0).all()


LONG = ([7, 33, 1, 64, 0, 40], [70, 5, 32, 31, 3, 0], False, 77)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "causal", "behind"), [*CASES, LONG, (LONG[0], LONG[0], True, 5)], ids=range(6)
)
def test_the_kernels_are_the_reference(q_lengths, k_lengths, causal, behind, dim, monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    results = []
    for choice, dtype in (("eager", torch.float64), ("triton", torch.float32)):
        monkeypatch.setenv("REPULSIVE_KERNELS", choice)
        queries, keys = sides(q_lengths, k_lengths, behind, DEVICE)
        torch.manual_seed(1)
        q, k, v = (random(len(side.places), 2, dim, dtype, DEVICE) for side in (queries, keys, keys))
        assert (queries.kernels and packed._supported(q)) == (choice == "triton")
        out = attend(q, k, v, queries, keys, causal)
        out.backward(torch.randn(out.shape, dtype=torch.float64).to(out))
        results.append([x.double() for x in (out, q.grad, k.grad, v.grad)])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_lie_apart(causal, monkeypatch):
    """Tokens may have a stride; and both kinds are one where a sentence is its own partner."""
    pytest.importorskip("triton")
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    side = Packed.of(torch.tensor([5, 39, 9], device=DEVICE))
    wide = torch.randn(53, 4, 2, 16, device=DEVICE)
    qkv = wide[:, 1:]
    found = packed.attend(qkv, side, causal)
    torch.testing.assert_close(found, packed.attend(qkv.contiguous(), side, causal))
    if not causal:
        torch.testing.assert_close(found, packed.attend_to(qkv[:, 0], qkv[:, 1:], side, side))


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("collect", [None, "outputs", "values"])
def test_a_packed_batch_is_the_padded_one(pre_norm, collect):
    torch.manual_seed(0)
    config = TransformerConfig.tiny(50, pre_norm=pre_norm, width=32, heads=2, dropout=0.0)
    model = Transformer(config).double()
    lengths = torch.tensor([[4, 7], [9, 2], [1, 1]])
    source, target = (torch.zeros(3, int(side.max()), dtype=torch.long) for side in lengths.T)
    for row, (s, t) in enumerate(lengths.tolist()):
        source[row, :s], target[row, :t] = torch.randint(4, 50, (s,)), torch.randint(4, 50, (t,))
    flat = [
        torch.cat([table[row, :n] for row, n in enumerate(side)])
        for table, side in zip((source, target), lengths.T, strict=True)
    ]
    flat = [torch.cat([x, x.new_zeros(3)]) for x in flat]
    a, b = (Packed.of(side, len(x)) for side, x in zip(lengths.T, flat, strict=True))
    padded = model(source, target, collect=collect)
    found = model(*flat, collect=collect, packed=(a, b))
    real = target != 0
    if collect is not None:
        (padded, tables), (found, rows) = padded, found
        masks = [source != 0] * 2 + [real, source != 0 if collect == "values" else real] * 2
        for table, row, mask in zip(tables, rows, masks, strict=True):  # [B, M, T, d] and [1, M, N, d]
            torch.testing.assert_close(row[0, :, : int(mask.sum())].transpose(0, 1), table.transpose(1, 2)[mask])
    torch.testing.assert_close(found[: int(real.sum())], padded[real])


def test_no_weights_of_packed_sentences():
    model = Transformer(TransformerConfig.tiny(50))
    side = Packed.of(torch.tensor([3]))
    with pytest.raises(ValueError, match="outputs"):
        model(torch.ones(3).long(), torch.ones(3).long(), collect="weights", packed=(side, side))


@pytest.mark.gpu
def test_half_precision_compiled_and_captured(monkeypatch):
    """A compiled layer under autocast, inside a CUDA graph, is near float32 without any of it."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.small(60, layers=(1, 1), dropout=0.0)).cuda()
    lengths = torch.randint(1, 70, (40,), device="cuda")
    rows = int(lengths.sum()) + 50
    tokens = torch.randint(4, 60, (rows,), device="cuda")

    def gradients():
        a = b = Packed.of(lengths, rows, 70)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens, tokens, packed=(a, b))
        logits[: rows - 50].float().logsumexp(-1).mean().backward()

    monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
    gradients()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    model.compile_layers()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        gradients()
    graph.replay()
    whole = torch.stack([exact.norm() for exact in expected]).norm()  # keys' biases have no gradient
    for parameter, exact in zip(model.parameters(), expected, strict=True):
        assert float((parameter.grad - exact).norm() / (exact.norm() + 1e-3 * whole)) < 0.05

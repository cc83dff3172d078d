"""Ranks with different tokens apply the same force, computed from all tokens; with real process groups."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from repulsive import SVGD, repel
from repulsive.repulsion import head_placement
from repulsive.repulsion.logits.force import _centred
from tests.ranks import start_ranks
from tests.repulsion.logits.small_decoder import Decoder, loss_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

RULE = SVGD(alpha=0.3, space="logits", tokens=128, every=2)
STEPS = 5


def model_and_data() -> tuple[Decoder, torch.Tensor]:
    torch.manual_seed(0)
    return Decoder().double(), torch.randint(0, 30, (STEPS, 8, 6))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    for ids in data:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()


def worker(rank: int, folder: str, kind: str) -> None:
    warnings.simplefilter("error", FutureWarning)  # torch gives them for its deprecated functions
    sent = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)
    model, data = model_and_data()
    wrapped: nn.Module = model
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", (2,))
        placement = head_placement(model) if kind == "fsdp-columns" else None
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repel(wrapped, optimizer, RULE, seed=4, verbose=False, allow_unproved=True)

    def counting(received, given, *args, **kwargs):
        sent.append(given.numel() * given.element_size())
        return gather(received, given, *args, **kwargs)

    if kind == "ddp":  # sharded weights call all_gather too
        setattr(dist, name, counting)
    train(wrapped, optimizer, data[:, 4 * rank : 4 * rank + 4])
    setattr(dist, name, gather)
    state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    torch.save({"state": state, "sent": sent}, f"{folder}/{rank}.pt")


@pytest.mark.parametrize(
    "kind",
    ["ddp", pytest.param("fsdp-rows", marks=pytest.mark.slow), pytest.param("fsdp-columns", marks=pytest.mark.slow)],
)
def test_two_processes_equal_one_on_all_tokens(kind, tmp_path):
    if kind != "ddp" and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 cannot run FSDP2 on a CPU")
    start_ranks(worker, str(tmp_path), kind)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    states = [rank["state"] for rank in ranks]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repel(model, optimizer, RULE, seed=4, verbose=False, allow_unproved=True)
    train(model, optimizer, data)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-9, atol=1e-12)
    plain, data = model_and_data()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data)
    difference = (plain.layers[0].q_proj.weight - states[0]["layers.0.q_proj.weight"]).norm()
    assert difference > 1e-3  # repulsion had an effect
    if kind == "ddp":
        # 3 forces x 2 layers x (q, k), each with 64 rows: an input, its projection and three numbers.
        assert ranks[0]["sent"] == [64 * (16 + 16 + 3) * 8] * 12


class Rounded(nn.Linear):
    """A projection whose second head rounds 0.3 % of its half-precision numbers to the neighbour, as GPU tiles may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        heads = result.detach().unflatten(-1, (4, -1))  # [..., M, d]
        other = torch.rand(heads[..., 1, :].shape, generator=torch.Generator().manual_seed(0)) < 0.003
        heads[..., 1, :] *= 1 + 2**-8 * other
        return result


def half_precision_worker(rank: int, folder: str, is_half: bool) -> None:
    """Train equal heads; in the second layer of the second rank no token is seen."""
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        for name in ("q_proj", "k_proj"):
            old = getattr(layer, name)
            linear = Rounded(16, 16)
            with torch.no_grad():
                linear.weight.copy_(old.weight[:4].repeat(4, 1))
                linear.bias.zero_()
            setattr(layer, name, linear)
    if rank == 1:
        model.layers[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = SVGD("heads", "auto", space="logits", tokens=128)
    wrapped = nn.parallel.DistributedDataParallel(model)
    handle = repel(wrapped, optimizer, rule, verbose=False, allow_unproved=True)
    ids = torch.randint(0, 30, (8, 16), generator=torch.Generator().manual_seed(rank))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
        loss_of(wrapped, ids).backward()
    optimizer.step()
    torch.save([report.repulsion for report in handle.report()], f"{folder}/{rank}.pt")


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads", "ignore:space='logits'")
@pytest.mark.parametrize("is_half", [True, False])
def test_gathered_tokens_keep_their_precision(is_half, tmp_path):
    """Equal heads differ by rounding errors of half precision; in float32 the same difference is real."""
    start_ranks(half_precision_worker, str(tmp_path), is_half)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0] == ranks[1] and all((force == 0) == is_half for force in ranks[0])


def test_sequences_of_ranks_have_their_own_mean_key():
    keys = torch.randn(1, 12, 2, 3, dtype=torch.float64)  # two ranks with six tokens each
    weights = torch.tensor([[1.0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]], dtype=torch.float64)
    sequences = torch.tensor([[0, 0, 1, 1, 1, 2, 0, 0, 0, 0, 2, 2]])
    known = torch.zeros_like(keys)
    for rows in ([0, 1], [2, 3], [5], [6, 7, 9], [10, 11]):
        known[:, rows] = keys[:, rows] - keys[:, rows].mean(1, keepdim=True)
    torch.testing.assert_close(_centred(keys, weights, sequences, 6, 2), known)


class LargestResult(TorchDispatchMode):
    """Records the largest number of elements of any result of torch."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_memory_grows_with_the_tokens_of_a_rank_not_with_those_of_all():
    most = []
    for ranks in (1, 2, 4):
        keys, weights = torch.randn(1, 256 * ranks, 1, 4), torch.ones(1, 256 * ranks)
        sequences = torch.arange(256).repeat(ranks)[None]
        with LargestResult() as largest:
            _centred(keys, weights, sequences, 256, ranks)
        most.append(largest.numbers)
    assert most == [256**2 * ranks for ranks in (1, 2, 4)]

"""Data-parallel ranks draw equal noise and keep equal weights, in real process groups. See also `test_sharded`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from repulsive import SPOS, repel
from tests.ranks import start_ranks
from tests.repulsion.conftest import Encoder

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def model_and_data():
    torch.manual_seed(0)
    model = Encoder().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model, torch.randn(8, 5, 16).double(), torch.randint(3, (8,))


def train(model, optimizer, x, y, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def worker(rank: int, folder: str) -> None:
    model, x, y = model_and_data()
    torch.manual_seed(rank)  # torch's random state differs between ranks; counter-based noise must not
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repel(wrapped, optimizer, SPOS(0.1, 0.5, 100.0), seed=4, verbose=False)
    train(wrapped, optimizer, x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4])
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")


def test_ddp_equals_one_process(tmp_path):
    start_ranks(worker, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    model, x, y = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repel(model, optimizer, SPOS(0.1, 0.5, 100.0), seed=4, verbose=False)
    train(model, optimizer, x, y)
    assert all(torch.allclose(ranks[0][name], value, rtol=1e-10) for name, value in model.state_dict().items())

"""The head monitor in two real processes: only rank 0 measures, and training is the same."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from repulsive import HeadMonitor
from tests.ranks import start_ranks


def worker(rank: int, folder: str) -> None:
    results = {}
    for is_monitored in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        model = nn.parallel.DistributedDataParallel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(rank)
        monitor = HeadMonitor(model, every=2) if is_monitored else None
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 16)).square().mean().backward()
            optimizer.step()
            if monitor is not None:
                monitor.step()
        results[is_monitored] = torch.cat([parameter.flatten() for parameter in model.parameters()])
    same = torch.equal(results[False], results[True])
    steps = [measurement.step for measurement in monitor.history]
    with open(f"{folder}/{rank}.json", "w", encoding="utf-8") as file:
        json.dump({"same": same, "steps": steps}, file)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_only_rank_0_measures_and_training_is_the_same(tmp_path):
    start_ranks(worker, str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks == [{"same": True, "steps": [0, 2]}, {"same": True, "steps": []}]

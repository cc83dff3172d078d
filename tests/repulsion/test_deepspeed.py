"""DeepSpeed: ZeRO is refused by name, stage 0 works. The real package is tested where it is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from repulsive import OptimizerError, repel


def imitated(optimizer):
    """An object of a class that looks like DeepSpeed's optimizer of ZeRO stages 1 and 2."""
    base = type("ZeROOptimizer", (), {"__module__": "deepspeed.runtime.base_optimizer"})
    kind = type("DeepSpeedZeroOptimizer", (base,), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})
    made = kind()
    made.optimizer, made.param_groups = optimizer, optimizer.param_groups
    return made


def test_zero_is_refused(make_model):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptimizerError, match=r"DeepSpeedZeroOptimizer of DeepSpeed .* use ZeRO stage 0, or FSDP2"):
        repel(model, imitated(optimizer))


def test_an_engine_with_zero_is_refused(make_model):
    """Also if the torch optimizer itself is passed."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = torch.nn.Module()
    engine.module, engine.optimizer = model, imitated(optimizer)
    with pytest.raises(OptimizerError, match="DeepSpeedZeroOptimizer of DeepSpeed"):
        repel(engine, optimizer)


def test_an_engine_without_zero_is_accepted(make_model):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    kind = type("DeepSpeedEngine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    engine = kind()
    engine.module, engine.optimizer = model, optimizer
    assert repel(engine, optimizer, verbose=False).groups


REAL = """
import sys
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile C++
from repulsive import OptimizerError, SVGD, repel
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": int(sys.argv[1])}}
engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
try:
    handle = repel(engine, wrapped, SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=0.0), verbose=False)
except OptimizerError as error:
    print(error)
else:
    engine.backward(engine(torch.randn(4, 5, 32)).square().mean())
    engine.step()
    print(handle.steps, handle.report()[0].ratio)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("stage", "expected"), [("0", "1 0.3"), ("1", "DeepSpeedZeroOptimizer of DeepSpeed")])
def test_the_real_package(stage, expected, tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
    command = [sys.executable, "-c", REAL, stage]
    done = subprocess.run(command, env=os.environ | ranks, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith(expected)

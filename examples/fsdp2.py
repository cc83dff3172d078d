"""FSDP2 on two processes, with checkpoints that another number of processes can load.

    torchrun --nproc-per-node 2 examples/fsdp2.py --folder /tmp/fsdp2        # trains and saves half-way
    python examples/fsdp2.py --folder /tmp/fsdp2 --resume                    # one process continues from there

A small encoder learns to reverse sequences, in float64 on the CPU. Half-way, `torch.distributed.checkpoint` saves the
model, the optimizer and the state of repulsion in the background, while training continues. The resumed training
loads the checkpoint into one process, trains to the end, and compares its weights with those of the first training:
they agree within 1e-12, noise of SPOS included. Prints the mean cosine between heads at the start and at the end.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from repulsive import SPOS, find_heads, repel
from repulsive.repulsion import Handle, head_placement

TOKENS, LENGTH, WIDTH, BATCH = 8, 6, 32, 64


class Reverser(nn.Module):
    """Token embeddings with positions, two Transformer layers, one token per position."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))  # [B, T, D]
        return self.head(self.encoder(x).flatten(0, 1))  # [B * T, TOKENS]


def batch(step: int) -> Tensor:
    """Token ids [B, T] of a step: this rank's share of the same global batch, whatever the number of ranks."""
    ids = torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def mean_cosine(model: nn.Module) -> float:
    """Mean cosine between two different heads, over all groups. All ranks call it: it gathers sharded weights."""
    values = []
    for group in find_heads(model):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        values.append((unit @ unit.T)[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle) -> dict[str, object]:
    """Everything that a resumed training needs. DCP calls `state_dict` and `load_state_dict` of the handle."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "repulsive": handle}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, gathered."""
    tensors = {name: x.detach() for name, x in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    half, checkpoint, final = options.steps // 2, options.folder / "half-way", options.folder / "final.safetensors"
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saving = dist.new_group(backend="gloo")  # the thread that saves needs a group of its own

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Reverser()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = head_placement(model, mesh=mesh)  # every rank holds a piece of every head
    for module in (*model.encoder.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = SPOS(stepsize=4.0, alpha="auto", ratio=0.3, beta=1e6, space="sphere", smoothing=0.0)
    handle = repel(model, optimizer, rule, verbose=False)

    before = mean_cosine(model)
    if options.resume:
        state = state_of(model, optimizer, handle)
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pending = None
    for step in range(half if options.resume else 0, options.steps):
        if step == half and not options.resume:
            # On a CPU some versions of `async_save` share memory with the weights, which the next step changes.
            state = {name: _copied(part) for name, part in state_of(model, optimizer, handle).items()}
            start = time.perf_counter()
            pending = dcp.async_save(state, checkpoint_id=checkpoint, process_group=saving)
            stalled = time.perf_counter() - start
        ids = batch(step)
        loss = nn.functional.cross_entropy(model(ids), ids.flip(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after, weights = mean_cosine(model), whole(model)
    dist.all_reduce(loss := loss.detach() / dist.get_world_size())
    if pending is not None:
        pending.result()
    if dist.get_rank() == 0:
        print(f"ranks {dist.get_world_size()}, steps {handle.steps}, loss {loss.item():.4f}")
        print(f"mean cosine between heads {before:+.4f} -> {after:+.4f}")
        if not options.resume:
            final.write_bytes(save(weights))
            print(f"saved after {half} steps; training waited {stalled:.2f} s")
    if options.resume:
        expected = load_file(final)
        difference = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
        print(f"largest difference from the first training {difference:.1e}")
        if difference > 1e-12:
            raise SystemExit("the resumed training differs")
    dist.destroy_process_group()


def _copied(part: object) -> object:
    if isinstance(part, dict):
        return {name: _copied(value) for name, value in part.items()}
    return part.detach().clone() if isinstance(part, Tensor) else part


if __name__ == "__main__":
    main()

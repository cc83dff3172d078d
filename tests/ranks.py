"""Start the ranks of a real process group quickly."""

import faulthandler
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by the server that ranks are forked from: a new interpreter needs seconds for each rank.
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "repulsive"]
PATIENCE = timedelta(seconds=300)  # on a busy machine, too, only a rank that hangs takes longer to answer
HERE = "127.0.0.1"


def start_ranks(function: Callable[..., None], *args: object, world: int = 2) -> None:
    """Run `function(rank, *args)` in `world` processes that form a process group; raise the error of the first.

    The processes do not share the memory of this one: they are forked from a server with the environment of the first
    call, so `function` itself sets the environment variables that it needs.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    # This process holds the port from now on: one that is only looked up could be taken before a rank opens it.
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    mp.start_processes(_run, (store.port, world, function, *args), nprocs=world, start_method="forkserver")


def _run(rank: int, port: int, world: int, function: Callable[..., None], *args: object) -> None:
    faulthandler.enable()  # a crash prints where it happened
    torch.set_num_threads(1)
    store = dist.TCPStore(HERE, port, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    function(rank, *args)
    dist.destroy_process_group()
    os._exit(0)  # without the interpreter's shutdown, which aborted in some runs (cause unknown)

"""Start the ranks of a real process group quickly."""

import multiprocessing
import socket
from collections.abc import Callable

import torch.multiprocessing as mp

# Imported once, by the server that ranks are forked from: a new interpreter needs seconds for each rank.
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "repulsive"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_ranks(function: Callable[..., None], *args: object, world: int = 2) -> None:
    """Run `function(rank, port, *args)` in `world` new processes and wait for them; raise the error of the first.

    The processes do not share the memory of this one: they are forked from a server with the environment of the first
    call, so `function` itself sets the environment variables that it needs.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(function, (free_port(), *args), nprocs=world, start_method="forkserver")

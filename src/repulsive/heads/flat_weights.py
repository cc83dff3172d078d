"""Refuse models under FSDP1, which flattens the weights of many layers into one vector."""

from __future__ import annotations

from torch import nn

from repulsive.errors import UnsupportedWeights

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


def refuse_flat_weights(model: nn.Module) -> None:
    """Raise an error if FSDP1 flattens or shards weights of the model.

    Raises:
        UnsupportedWeights: a part of the model is wrapped, and its parameters do not keep their shapes.
    """
    for module in model.modules():
        # Compare names: importing FSDP1 takes long, and it is rarely used.
        if any(f"{kind.__module__}.{kind.__name__}" == _FSDP1 for kind in type(module).__mro__):
            strategy = getattr(module, "sharding_strategy", None)
            if getattr(strategy, "name", "") != "NO_SHARD" or not getattr(module, "_use_orig_params", False):
                raise UnsupportedWeights(
                    "FullyShardedDataParallel (FSDP1) flattens weights, so that heads cannot be found in them; shard "
                    "with torch.distributed.fsdp.fully_shard (FSDP2) instead"
                )

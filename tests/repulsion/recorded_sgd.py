"""SGD that records the gradients that it is given, and the gradients of a group."""

import torch


class Recorded(torch.optim.SGD):
    """SGD that keeps a copy of the gradients that it is given."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.given: list[list[torch.Tensor]] = []

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.given.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        super().step()
        return loss


def gradients_of(group) -> torch.Tensor:
    return torch.cat([part.take(part.parameter().grad) for part in group.slices], dim=-1)

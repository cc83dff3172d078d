"""A task: is the number of ones in a sequence of bits odd?"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Forward, Inputs, Task
from repulsive.lab.text.batches import Batch

from .attention import Blend


@dataclass(frozen=True, kw_only=True)
class Parity(Recipe):
    length: int = 4
    items: int = 32


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.answer = nn.Embedding(2, 12), Blend(), nn.Linear(12, 2)

    def forward(self, bits: Tensor) -> Tensor:
        return self.answer(self.attention(self.embed(bits)).mean(1))  # [B, 2]


class ParityTask(Task):
    select_by = "nll"
    shown = ("nll",)

    def __init__(self, recipe: Parity) -> None:
        self.recipe, self.num_data, self.checksums = recipe, recipe.items, {}
        drawn = torch.Generator().manual_seed(1)
        self.parts = {
            name: torch.randint(2, (recipe.items, recipe.length), generator=drawn) for name in ("train", "dev", "test")
        }

    def model(self) -> nn.Module:
        return Reader()

    def to(self, device: torch.device) -> None:
        self.parts = {name: bits.to(device) for name, bits in self.parts.items()}

    def order(self, epoch: int) -> list[Batch]:
        drawn = torch.Generator().manual_seed(1000 * self.recipe.seed + epoch)
        shuffled = torch.randperm(self.num_data, generator=drawn)
        return [Batch(indices, self.recipe.length) for indices in shuffled.split(self.recipe.training.batch)]

    def fetch(self, batch: Batch) -> Inputs:
        return {"indices": batch.indices}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        bits = self.parts["train"][inputs["indices"]]
        return nn.functional.cross_entropy(model(bits), bits.sum(1) % 2)

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        bits = self.parts[part]
        nll = nn.functional.cross_entropy(model(bits).float(), bits.sum(1) % 2, reduction="none").cpu()
        return Evaluation({"nll": float(nll.mean())}, {"nll": nll})


PARITY = (Parity, ParityTask)

"""The same ELECTRA, batches and masks under transformers' `Trainer`: how fast it trains."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from studies.speed.marian import Stretch, Timer, of_recipe
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from repulsive.lab.systems.electra.task import PretrainingTask


class Rows(Dataset[Tensor]):
    """Blocks as they lie in the memory map; a worker fetches a whole batch at once."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # int16 [N, length + 2]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]

    def __getitems__(self, places: Sequence[int]) -> Tensor:
        return self.rows[torch.tensor(places)]


class WithLoss(nn.Module):
    """A model that gives its loss, as `Trainer` wants it: masks are drawn on the device, by the task's own code.

    Args:
        task: whose loss.
        model: what it made.
    """

    def __init__(self, task: PretrainingTask, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """The loss of blocks, int16 [B, length + 2]."""
        return {"loss": self._task.loss(self.model, {"rows": rows}, self._task.data.length)}


def as_inputs(rows: Tensor) -> dict[str, Tensor]:
    """What the model's `forward` takes."""
    return {"rows": rows}


def by_trainer(task: PretrainingTask, timer: Timer, workers: int) -> Stretch:
    """Train as the recipe says, with everything off that costs time and is no training.

    Weights, batch, precision, clipping, optimiser and rate are the recipe's; but bias correction stays on, and the
    schedule is linear after the warm-up.

    Args:
        task: of a recipe; its model is made here: as the project trains it where the recipe asks for compilation, else
            of transformers' modules as they are.
        timer: stops the training.
        workers: processes that fetch batches.
    """
    recipe = task.recipe
    torch.manual_seed(recipe.seed)
    model = WithLoss(task, task.model() if recipe.training.compile else task.plain_model())
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=recipe.training.batch,
            max_steps=len(timer.tokens),
            adam_epsilon=recipe.optimizer.eps,
            lr_scheduler_type="linear",
            max_grad_norm=recipe.optimizer.clip,
            dataloader_drop_last=True,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            **of_recipe(recipe, timer.device),
        )
        rows: Any = Rows(task.data.parts["train"][: task.blocks])
        trainer = Trainer(model=model, args=settings, data_collator=as_inputs, train_dataset=rows, callbacks=[timer])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert timer.found is not None
    return timer.found

"""Train the same ELECTRA on the same batches and masks with transformers' `Trainer`, and time it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from studies.speed.marian_trainer import Stretch, Timer, trainer_settings
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from repulsive.lab.systems.electra.task import PretrainingTask


class Rows(Dataset[Tensor]):
    """Blocks of the memory map; a worker fetches a whole batch at once."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # int16 [N, length + 2]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]

    def __getitems__(self, places: Sequence[int]) -> Tensor:
        return self.rows[torch.tensor(places)]


class WithLoss(nn.Module):
    """A model that returns its loss, as `Trainer` expects; the task draws masks on the device.

    Args:
        task: computes the loss.
        model: made by the task.
    """

    def __init__(self, task: PretrainingTask, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """The loss of blocks, int16 [B, length + 2]."""
        return {"loss": self._task.loss(self.model, {"rows": rows}, self._task.data.length)}


def as_inputs(rows: Tensor) -> dict[str, Tensor]:
    """Arguments of the model's `forward`."""
    return {"rows": rows}


def train_with_trainer(task: PretrainingTask, timer: Timer, workers: int) -> Stretch:
    """Train with `Trainer` as in the recipe, without logging, saving and checks.

    Weights, batch size, precision, clipping, optimizer and learning rate are the recipe's, but bias correction stays on
    and the schedule is linear after the warm-up.

    Args:
        task: makes the model: this package's modules if the recipe compiles, else unchanged ones of transformers.
        timer: stops the training.
        workers: number of processes that fetch batches.
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
            **trainer_settings(recipe, timer.device),
        )
        rows: Any = Rows(task.data.parts["train"][: task.blocks])
        trainer = Trainer(model=model, args=settings, data_collator=as_inputs, train_dataset=rows, callbacks=[timer])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert timer.stretch is not None
    return timer.stretch

"""The same ELECTRA, batches and masks under transformers' `Trainer`: how fast it trains."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from marian import Stretch, Timer
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from repulsive.recipes.electra import PretrainingTask


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
        task: of a recipe; its model is made here.
        timer: stops the training.
        workers: processes that fetch batches.
    """
    recipe, on_gpu = task.recipe, timer.device.type == "cuda"
    optimizer = recipe.optimizer
    torch.manual_seed(recipe.seed)
    model = WithLoss(task, task.model())
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=recipe.training.batch,
            max_steps=len(timer.tokens),
            bf16=recipe.training.precision == "bf16",
            use_cpu=not on_gpu,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            learning_rate=optimizer.lr,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            lr_scheduler_type="linear",
            warmup_steps=optimizer.warmup,
            max_grad_norm=optimizer.clip,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it waits for every loss
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            dataloader_pin_memory=on_gpu,
        )
        rows: Any = Rows(task.data.parts["train"][: task.blocks])
        trainer = Trainer(model=model, args=settings, data_collator=as_inputs, train_dataset=rows, callbacks=[timer])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert timer.found is not None
    return timer.found

"""The training loop: one for all tasks, on Accelerate, exact when resumed.

Which batch comes when is a function of the recipe's seed and the epoch, and the learning rate one of the step. So what
a checkpoint has to hold is little: weights, the optimiser, the random generators, and how far it is.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from repulsive.errors import DivergedError
from repulsive.repulsion.attach import unwrap_optimizer
from repulsive.training import methods
from repulsive.training.capture import CapturedGradients
from repulsive.training.meter import Meter
from repulsive.training.recipe import Recipe
from repulsive.training.runs import RunFolder
from repulsive.training.task import Evaluation, Inputs, Task
from repulsive.training.trees import random_state, restore_random_state
from repulsive.training.watch import Watcher

PARTS = ("dev", "test")


class Stopped(Exception):
    """The user or the system asked the training to stop; it is saved and goes on with the same command."""


class Loop:
    """One run of a recipe, from its last checkpoint or from the start.

    Args:
        task: what is learned.
        recipe: how.
        folder: where everything goes.
        watcher: told what happens.
        device: "cpu", "cuda" or None for what Accelerate finds.
    """

    def __init__(
        self, task: Task, recipe: Recipe, folder: RunFolder, watcher: Watcher, device: str | None = None
    ) -> None:
        self.task, self.recipe, self.folder, self.watcher = task, recipe, folder, watcher
        self.accelerator = _accelerator(recipe.training.precision, device)
        self.device = self.accelerator.device
        self.main = self.accelerator.is_main_process
        self.step = self.epoch = self.position = 0  # position: batches of this epoch that are done
        self.best: dict[str, Any] | None = None  # value, step and weights
        self.seconds = 0.0
        self._stop = False
        self._per_epoch = len(task.order(0))
        self.total = recipe.training.epochs * self._per_epoch

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and write the result.

        Raises:
            Stopped: a signal came; everything is saved.
            DivergedError: the loss is not a number.
            RunError, CheckpointError: the folder is another run's, or cannot be written.
        """
        if self.main:
            with self.folder.locked():
                return self._run()
        return self._run()

    def _run(self) -> dict[str, Any]:
        if self.main:
            self.folder.claim(self.recipe, self.task.checksums, _describe(self.device))
        self.accelerator.wait_for_everyone()
        if (known := self.folder.result) is not None:
            self.watcher.finished(known)
            return known
        self._build()
        self._resume()
        self.watcher.started(self.step, self.total, self._per_epoch)
        with self._signals():
            self._train()
        return self._finish()

    def _build(self) -> None:
        torch.manual_seed(self.recipe.seed)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.recipe.training.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.recipe.training.tf32
        self.task.to(self.device)
        model = self.task.model().to(self.device)
        optimizer = methods.make_optimizer(self.recipe.optimizer, model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.bare: nn.Module = self.accelerator.unwrap_model(self.model)
        self.handle = methods.attach(self.bare, self.optimizer, self.recipe, self.task.num_data, self.total)
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.accelerator.process_index)  # dropout differs by rank
        self.meter = Meter(self.device)
        self._gradients: Any = self._eager
        if self.recipe.training.capture and self.device.type == "cuda" and self.accelerator.num_processes == 1:
            self._gradients = CapturedGradients(self._compute, self.bare.parameters(), self.device)

    def _train(self) -> None:
        training = self.recipe.training
        self._saved_at = self._began = time.monotonic()
        self.bare.train()
        while self.step < self.total:
            batches = self.task.order(self.epoch)
            for batch in batches[self.position :]:
                self._learn(batch)
                self.position += 1
                self.step += 1
                last = self.position == len(batches)
                if self.device.type == "cpu" and self.accelerator.num_processes == 1:
                    self._check()  # costs nothing there
                if self.step % training.log_every == 0 or last:
                    self._log()
                if self.step % training.evaluate_every == 0 if training.evaluate_every else last:
                    self._look()
                if last:
                    self.epoch, self.position = self.epoch + 1, 0
                if self._should_save(last) and self.step < self.total:
                    self._save()
                if self._stopping():
                    if self._saved_step != self.step:
                        self._save()
                    raise Stopped(f"stopped at step {self.step} of {self.total}; the same command goes on from there")

    def _learn(self, batch: Any) -> None:
        rate = methods.rate_at(self.step, self.recipe.optimizer, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        processes, mine = self.accelerator.num_processes, batch
        self._share = 1.0
        if processes > 1:  # every process takes some items of the same batch; means are weighted by their numbers
            mine, count = _slice(batch, self.accelerator.process_index, processes)
            self._share = count * processes / len(batch)
        self._gradients(self.task.fetch(mine), mine.length)
        self.optimizer.step()

    def _eager(self, inputs: Inputs, length: int) -> None:
        self.optimizer.zero_grad()
        self._compute({name: x.to(self.device, non_blocking=True) for name, x in inputs.items()}, length)

    def _compute(self, inputs: Inputs, length: int) -> None:
        loss = self.task.loss(self.model, inputs, length) * self._share
        self.accelerator.backward(loss)
        self.meter.add(loss.detach())

    # -- looking ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        bad = self.meter.first_bad()
        if bad is None:
            return
        step = self.step - self.meter.count() + bad + 1
        batch = self.task.order((step - 1) // self._per_epoch)[(step - 1) % self._per_epoch]
        ids = batch.indices.tolist()
        listed = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        raise DivergedError(
            f"step {step}: the loss is not a finite number; items {listed} of the training set were in the batch. "
            "Nothing of that step is saved. Lower optimizer.lr, set optimizer.clip, or lower method.alpha or "
            f"method.stepsize, and train with another --out ({self.folder.path} keeps its last good checkpoint)"
        )

    def _log(self) -> None:
        if self.accelerator.num_processes > 1:
            self.meter.merge(self.accelerator)
        self._check()
        values = {"epoch": self.step / self._per_epoch, "loss": self.meter.mean()}
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        self.meter.reset()
        self._tell("train", values)
        reports = [r for r in self.handle.report() if r.step >= 0]
        if reports:
            fields = ("ratio", "drive", "repulsion", "distance", "bandwidth", "alpha")
            means = {name: sum(getattr(r, name) for r in reports) / len(reports) for name in fields}
            self._tell("heads", {name: x for name, x in means.items() if x == x})

    def _look(self) -> None:
        found = self._evaluate("dev")
        self._tell("dev", found.metrics)
        value = found.metrics[self.task.select_by]
        if self.best is None or value > self.best["value"]:
            weights = {name: x.detach().clone() for name, x in self.bare.state_dict().items()}
            self.best = {"value": value, "step": self.step, "weights": weights}
        self.bare.train()

    def _evaluate(self, part: str) -> Evaluation:
        self.bare.eval()
        with torch.inference_mode(), self.accelerator.autocast():
            return self.task.evaluate(self.bare, part)

    def _tell(self, kind: str, values: dict[str, float]) -> None:
        if self.main:
            self.folder.log(kind, self.step, values)
            self.watcher.saw(kind, self.step, values)

    def _finish(self) -> dict[str, Any]:
        self.accelerator.wait_for_everyone()
        assert self.best is not None, "a training has at least one epoch, and looks after it"
        self.bare.load_state_dict(self.best["weights"])
        found = {part: self._evaluate(part) for part in PARTS}
        self.seconds += time.monotonic() - self._began
        result = {
            "label": self.recipe.label,
            "best_step": self.best["step"],
            "steps": self.step,
            "seconds": self.seconds,
            **{part: evaluation.metrics for part, evaluation in found.items()},
        }
        if self.main:
            self.folder.best.save(self.best["step"], {"model": self.best["weights"]})
            self.folder.finish(result, {part: evaluation.items for part, evaluation in found.items()})
            self.watcher.finished(result)
        return result

    # -- saving and going on ------------------------------------------------------------------------------------

    _saved_step = -1

    def _should_save(self, end_of_epoch: bool) -> bool:
        training = self.recipe.training
        if training.save_every:
            return self.step % training.save_every == 0
        if self.step % training.log_every and not end_of_epoch:
            return False  # processes have to agree, which they do where they log
        return self._agree(time.monotonic() - self._saved_at >= training.save_seconds)

    def _save(self) -> None:
        self._check()
        now = time.monotonic()
        mine = random_state()
        everyones = _gather(self.accelerator, mine)
        if self.main:
            state = {
                "model": dict(self.bare.state_dict()),
                "optimizer": unwrap_optimizer(self.optimizer).state_dict(),
                "handle": self.handle.state_dict(),
                "random": everyones,
                "meter": self.meter.state,
                "progress": {"step": self.step, "epoch": self.epoch, "position": self.position},
                "best": self.best,
                "seconds": self.seconds + now - self._began,
            }
            self.folder.checkpoints.save(self.step, state)
        self._saved_at, self._saved_step = now, self.step

    def _resume(self) -> None:
        found = self.folder.checkpoints.latest()
        if found is None:
            if self.main:
                self.folder.rewind(-1)
            return
        state = found[1]
        self.bare.load_state_dict(state["model"])
        unwrap_optimizer(self.optimizer).load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])
        self.meter.restore(state["meter"])
        self.step, self.epoch, self.position = (state["progress"][name] for name in ("step", "epoch", "position"))
        self.best, self.seconds = state["best"], state["seconds"]
        if self.main:
            self.folder.rewind(self.step)
        if len(state["random"]) == self.accelerator.num_processes:
            restore_random_state(state["random"][self.accelerator.process_index])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the training after the step; a second Ctrl-C ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: object) -> None:
            if self._stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stopping(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self._stop
        if self.step % self.recipe.training.log_every:
            return False
        return self._agree(self._stop)

    def _agree(self, flag: bool) -> bool:
        """True on every process if it is on any."""
        if self.accelerator.num_processes == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        return bool(self.accelerator.reduce(flags, "sum").item() > 0)


def _slice(batch: Any, index: int, processes: int) -> tuple[Any, int]:
    """This process's items of a batch, and how many count: one that got none takes one that does not."""
    mine = batch.indices[index::processes]
    if len(mine):
        return type(batch)(mine, batch.length), len(mine)
    return type(batch)(batch.indices[:1], batch.length), 0


def _gather(accelerator: Any, value: Any) -> list[Any]:
    if accelerator.num_processes == 1:
        return [value]
    everyone = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def _accelerator(precision: str, device: str | None) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if not torch.distributed.is_initialized():
        AcceleratorState._reset_state()  # a run before this one, in the same process, may have had another precision
    return Accelerator(mixed_precision="bf16" if precision == "bf16" else "no", cpu=device == "cpu")


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"

"""The training loop: one for all tasks, on Accelerate, bit-identical when resumed.

The batches are a function of the recipe's seed and the epoch, and the learning rate is a function of the step. So a
checkpoint holds only weights, optimizer state, random generators and progress.
"""

from __future__ import annotations

import math
import time
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from repulsive.errors import CheckpointError, RepulsiveError, short_message
from repulsive.lab.engine import methods
from repulsive.lab.engine.batch_gradients import BatchGradients
from repulsive.lab.engine.checkpoint import check_moments, check_weights
from repulsive.lab.engine.checkpoint_writers import make_writer
from repulsive.lab.engine.divergence import DivergenceGuard, tokens_required
from repulsive.lab.engine.freed_memory import keep_freed_memory
from repulsive.lab.engine.head_log import HeadLog
from repulsive.lab.engine.loss_meter import Meter
from repulsive.lab.engine.processes import Processes, describe_device
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.random_state import random_state, restore_random_state, seed_everything
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stop_signals import Request, Stopped, listening
from repulsive.lab.engine.task import Evaluation, Task, as_task
from repulsive.lab.engine.weight_average import Average
from repulsive.particles.rule import Rule
from repulsive.repulsion.attach import unwrap_optimizer

_RESUME = "rerun the same command to resume"


class Loop:
    """One training run, from the start or from its last checkpoint.

    Args:
        task: model, data, loss and evaluation; see `as_task` for classes that do not inherit from `Task`.
        recipe: settings of the run.
        folder: where checkpoints, logs and results are written.
        watcher: object that is notified of progress.
        device: "cpu", "cuda" or None for Accelerate's choice.
    """

    def __init__(
        self, task: Task, recipe: Recipe, folder: RunFolder, watcher: Watcher, device: str | None = None
    ) -> None:
        self.task, self.recipe, self.folder, self.watcher = as_task(task), recipe, folder, watcher
        self.processes = Processes(device)
        self.accelerator, self.device = self.processes.accelerator, self.processes.device
        self.step = self.epoch = self.position = 0  # position: batches of this epoch that are done
        self.best: dict[str, Any] | None = None  # value of the metric, step and weights
        self.seconds = 0.0
        self._rate = 0.0  # learning rate of the last step
        self._saved_step = -1
        self._request = Request()
        # Reading the loss synchronises with a GPU or other processes. There it is checked only at logs and saves.
        self._check_every_step = self.device.type == "cpu" and self.processes.is_single
        self._per_epoch = len(self.task.order(0))
        self.total = recipe.training.epochs * self._per_epoch
        self.average = Average(recipe.training, self._per_epoch, self.total)

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and write the result.

        Raises:
            Stopped: a signal was received; everything is saved.
            DivergedError: the loss is not finite.
            RunError, CheckpointError: the folder belongs to another run, or cannot be written.
        """
        with ExitStack() as stack:
            self.processes.run_on_main(lambda: stack.enter_context(self.folder.locked()))
            self._writer = make_writer(self.recipe.training.checkpoint, self.folder.checkpoints, self.processes)
            stack.callback(self._writer.close)  # before the folder is unlocked
            return self._run()

    def _run(self) -> dict[str, Any]:
        device = describe_device(self.device)
        self.processes.run_on_main(
            lambda: self.folder.claim(self.recipe, self.task.checksums, device, self.task.assets())
        )
        if (existing := self.folder.result) is not None:
            self.watcher.finished(existing)
            return existing
        with listening() as self._request:
            self._build()
            self._resume()
            self.watcher.started(self.step, self.total, self._per_epoch)
            with tokens_required(self.folder):
                self._train()
            if self._saved_step != self.step:
                self._save(spare=1)  # the final evaluation may take long, and may be interrupted
            self._writer.wait()
            with self._request.at_once(f"stopped before the last evaluation, after step {self.step}; {_RESUME}"):
                result = self._final_evaluation()
            return self._finish(*result)

    def _build(self) -> None:
        seed_everything(self.recipe.seed)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.recipe.training.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.recipe.training.tf32
        else:
            keep_freed_memory()
        self.task.to(self.device)
        model = self.task.model().to(self.device)
        optimizer = methods.make_optimizer(self.recipe.optimizer, model, self.task.rate_factors(model))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.bare: nn.Module = self.accelerator.unwrap_model(self.model)
        repelled = self.task.repelled(self.bare)
        self.handle = methods.attach(repelled, self.optimizer, self.recipe, self._rule())
        self._heads = HeadLog(self.handle)
        seed_everything(self.recipe.seed * 1_000_003 + self.processes.index)  # dropout differs by rank
        self.meter = Meter(self.device)
        stop_collapsed = self.recipe.training.stop_collapsed
        self._guard = DivergenceGuard(self.task, self.folder, self.processes, self.meter, stop_collapsed=stop_collapsed)
        training, rule = self.recipe.training, self.handle.rule
        self._gradients = BatchGradients(
            self.task, self.model, self.optimizer, self.processes, self.meter, training, rule
        )

    def _rule(self) -> Rule | None:
        """Make the rule of the recipe."""
        return methods.make_rule(self.recipe.method, self.task.num_data, self.total)

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
                if self._check_every_step:
                    self._guard.check_losses(self.step)
                if self.step % training.log_every == 0 or last:
                    self._log()
                if self._should_validate(last):
                    self._validate()
                if self.average.is_due(self.step):
                    self.average.add(self.bare.state_dict())
                if last:
                    self.epoch, self.position = self.epoch + 1, 0
                if self._should_save(last) and self.step < self.total:
                    self._save()
                if (number := self._stopping()) and self.step < self.total:
                    if self._saved_step != self.step:
                        self._save()
                    self._writer.wait()
                    raise Stopped(f"stopped at step {self.step} of {self.total}; {_RESUME}", number)

    def _learn(self, batch: Any) -> None:
        self._rate = methods.rate_at(self.step, self.recipe.optimizer, self.total, self.step // self._per_epoch)
        methods.set_rate(self.optimizer, self._rate)
        if not self.recipe.optimizer.bias_correction:
            methods.undo_correction(self.optimizer, self.recipe.optimizer, self.step)
        self._gradients(batch)
        self.optimizer.step()

    # -- checks, logs and validation ----------------------------------------------------------------------------

    def _check_all(self) -> None:
        """Check the losses of every rank, and the weights."""
        self._merge()
        self._guard.check_losses(self.step)
        self._guard.check_weights(self.step, self.bare)

    def _merge(self) -> None:
        if not self.processes.is_single:
            self.meter.merge(self.accelerator)

    def _log(self) -> None:
        self._merge()
        self._guard.check_losses(self.step)
        values = {"epoch": self.step / self._per_epoch, "loss": self.meter.mean()}
        values["lr"] = self._rate
        self.meter.reset()
        self._report("train", values)
        if heads := self._heads.values():
            self._report("heads", heads)
            self._guard.watch_for_collapse(self.step, values["loss"], heads.get("drive", float("nan")))

    def _should_validate(self, end_of_epoch: bool) -> bool:
        every = self.recipe.training.evaluate_every
        return self.step == self.total or (self.step % every == 0 if every else end_of_epoch)

    def _validate(self) -> None:
        self._check_all()
        self.bare.eval()
        with torch.inference_mode():
            metrics = self.task.validate(self.bare).metrics
        self._guard.check_scores(self.step, "dev", metrics)
        self._report("dev", metrics)
        value = metrics[self.task.select_by]
        if self.best is None or value > self.best["value"] or math.isnan(self.best["value"]):
            weights = {name: x.detach().clone() for name, x in self.bare.state_dict().items()}
            self.best = {"value": value, "step": self.step, "weights": weights}
        self.bare.train()

    def _evaluate(self, part: str) -> Evaluation:
        self.bare.eval()
        with torch.inference_mode():
            evaluation = self.task.evaluate(self.bare, part)
        self._guard.check_scores(self.step, part, evaluation.metrics)
        return evaluation

    def _report(self, kind: str, values: dict[str, float]) -> None:
        self.processes.run_on_main(lambda: self.folder.log(kind, self.step, values))
        if self.processes.main:
            self.watcher.logged(kind, self.step, values)

    def _final_evaluation(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Evaluation]]:
        """Return the result, the weights that were evaluated, and the evaluation of every data split."""
        best = self.best
        assert best is not None, "the last step is always validated"
        if averaged := self.average.count:
            best = {"step": self.step, "weights": self.average.weights()}
        self.bare.load_state_dict(best["weights"])
        parts = {part: self._evaluate(part) for part in self.task.scored_parts}
        self.seconds += time.monotonic() - self._began
        result = {
            "label": self.recipe.label,
            "best_step": best["step"],
            "steps": self.step,
            "seconds": self.seconds,
            **{part: evaluation.metrics for part, evaluation in parts.items()},
        }
        if averaged:
            result["averaged"] = averaged
        if notes := parts["test"].notes:
            result["notes"] = notes
        return result, best, parts

    def _finish(self, result: dict[str, Any], best: dict[str, Any], parts: dict[str, Evaluation]) -> dict[str, Any]:
        def write() -> None:
            self.folder.best.save(best["step"], {"model": best["weights"]})
            self.folder.finish(result, {part: evaluation.items for part, evaluation in parts.items()})
            self.folder.checkpoints.drop(self.total)  # not needed once there is a result

        self.processes.run_on_main(write)
        self.watcher.finished(result)
        return result

    # -- saving and resuming ------------------------------------------------------------------------------------

    def _should_save(self, end_of_epoch: bool) -> bool:
        training = self.recipe.training
        if training.save_every:
            return self.step % training.save_every == 0
        if self.step % training.log_every and not end_of_epoch:
            return False  # ranks synchronise only when they log, and must agree on saving
        return bool(self.processes.maximum(time.monotonic() - self._saved_at >= training.save_seconds))

    def _save(self, spare: int = 0) -> None:
        self._check_all()
        now = time.monotonic()
        random_states = self.processes.gather(random_state())

        def state() -> dict[str, Any]:
            return {
                "model": dict(self.bare.state_dict()),
                "optimizer": unwrap_optimizer(self.optimizer).state_dict(),
                "handle": self.handle.state_dict(),
                "heads": self._heads.values(),
                "random": random_states,
                "parallel": self.processes.parallel,
                "meter": self.meter.state,
                "progress": {"step": self.step, "epoch": self.epoch, "position": self.position},
                "best": self.best,
                "average": self.average.state_dict(),
                "seconds": self.seconds + now - self._began,
            }

        self.processes.run_on_main(self.folder.sync)
        self._writer.save(self.step, state, spare)
        self._saved_at, self._saved_step = now, self.step

    def _resume(self) -> None:
        with warnings.catch_warnings():
            if not self.processes.main:
                warnings.simplefilter("ignore")  # the main process warns
            latest = self.folder.checkpoints.latest()
        if latest is not None:
            try:
                self._restore(latest[1])
            except RepulsiveError:
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
                why = short_message(error)
                raise CheckpointError(
                    f"{self.folder.path}: its checkpoint is of another training ({why}); remove checkpoints/ to start "
                    "again"
                ) from error
        self.processes.run_on_main(lambda: self.folder.rewind(self.step if latest is not None else -1))
        self._guard.read_log(self.folder.lines())

    def _restore(self, state: dict[str, Any]) -> None:
        self.bare.load_state_dict(state["model"])
        unwrap_optimizer(self.optimizer).load_state_dict(state["optimizer"])
        check_moments(unwrap_optimizer(self.optimizer))
        self.handle.load_state_dict(state["handle"])
        self._heads.restore(state.get("heads", {}))
        self.meter.restore(state["meter"])
        self.step, self.epoch, self.position = (int(state["progress"][name]) for name in ("step", "epoch", "position"))
        self.best, self.seconds = state["best"], float(state["seconds"])
        if self.best is not None:
            self.best |= {"value": float(self.best["value"]), "step": int(self.best["step"])}
            check_weights(self.best["weights"], state["model"])
        if "average" in state:
            self.average.load_state_dict(state["average"], self.device)
        if len(state["random"]) == self.processes.count:
            restore_random_state(state["random"][self.processes.index])
        self._saved_step = self.step
        if self.device.type == "cpu":
            self.processes.compare(state.get("parallel"), self.folder.path)

    def _stopping(self) -> int:
        """Return the signal number that any rank received; 0 if none, or at steps where ranks do not synchronise."""
        if not self.processes.is_single and self.step % self.recipe.training.log_every:
            return 0
        return self.processes.maximum(self._request.number or 0)

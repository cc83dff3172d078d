"""The training loop: one for all tasks, on Accelerate, exact when resumed.

Which batch comes when is a function of the recipe's seed and the epoch, and the learning rate one of the step. So what
a checkpoint has to hold is little: weights, the optimiser, the random generators, and how far it is.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn

from repulsive.errors import CheckpointError, DivergedError, RepulsiveError
from repulsive.lab.engine import methods
from repulsive.lab.engine.average import Average
from repulsive.lab.engine.capture import CapturedGradients
from repulsive.lab.engine.head_log import HeadLog
from repulsive.lab.engine.meter import Meter
from repulsive.lab.engine.processes import Processes
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stopping import Request, Stopped, listening
from repulsive.lab.engine.task import Evaluation, Inputs, Task
from repulsive.lab.engine.trees import check_moments, check_weights, random_state, restore_random_state, seed_everything
from repulsive.lab.engine.watch import Watcher
from repulsive.repulsion.attach import unwrap_optimizer
from repulsive.repulsion.model_collapse import CollapseDetector

_GO_ON = "the same command goes on from there"
PARTS = ("dev", "test")  # what the end is evaluated on, unless a task has more


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
        self.processes = Processes(device)
        self.accelerator, self.device = self.processes.accelerator, self.processes.device
        self.step = self.epoch = self.position = 0  # position: batches of this epoch that are done
        self.best: dict[str, Any] | None = None  # value, step and weights
        self.seconds = 0.0
        self._rate = 0.0  # of the last step
        self._saved_step = -1
        self._collapse = CollapseDetector()
        self._request = Request()
        # Elsewhere a look at the loss means to wait for it: there it is checked when it is logged, and before a save.
        self._check_every_step = self.device.type == "cpu" and self.processes.alone
        self._per_epoch = len(task.order(0))
        self.total = recipe.training.epochs * self._per_epoch
        self.average = Average(recipe.training, self._per_epoch, self.total)

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and write the result.

        Raises:
            Stopped: a signal came; everything is saved.
            DivergedError: the loss is not a number.
            RunError, CheckpointError: the folder is another run's, or cannot be written.
        """
        with ExitStack() as stack:
            self.processes.together(lambda: stack.enter_context(self.folder.locked()))
            return self._run()

    def _run(self) -> dict[str, Any]:
        device = _describe(self.device)
        self.processes.together(lambda: self.folder.claim(self.recipe, self.task.checksums, device))
        if (known := self.folder.result) is not None:
            self.watcher.finished(known)
            return known
        with listening() as self._request:
            self._build()
            self._resume()
            self.watcher.started(self.step, self.total, self._per_epoch)
            self._train()
            if self._saved_step != self.step:
                self._save(spare=1)  # the evaluation may take long: whatever ends it, no step is lost
            with self._request.at_once(f"stopped before the last evaluation, after step {self.step}; {_GO_ON}"):
                result = self._evaluated()
            return self._finish(*result)

    def _build(self) -> None:
        seed_everything(self.recipe.seed)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.recipe.training.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.recipe.training.tf32
        self.task.to(self.device)
        model = self.task.model().to(self.device)
        rate_factors = getattr(self.task, "rate_factors", None)
        factors = rate_factors(model) if rate_factors is not None else None
        optimizer = methods.make_optimizer(self.recipe.optimizer, model, factors)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.bare: nn.Module = self.accelerator.unwrap_model(self.model)
        part = getattr(self.task, "repelled", None)
        repelled = part(self.bare) if part is not None else self.bare
        self.handle = methods.attach(repelled, self.optimizer, self.recipe, self.task.num_data, self.total)
        self._heads = HeadLog(self.handle)
        seed_everything(self.recipe.seed * 1_000_003 + self.processes.index)  # dropout differs by rank
        self.meter = Meter(self.device)
        self._gradients: Any = self._eager
        if self.recipe.training.capture and self.device.type == "cuda" and self.processes.alone:
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
                if self._check_every_step:
                    self._check()
                if self.step % training.log_every == 0 or last:
                    self._log()
                if self._should_look(last):
                    self._look()
                if self.average.due(self.step):
                    self.average.add(self.bare.state_dict())
                if last:
                    self.epoch, self.position = self.epoch + 1, 0
                if self._should_save(last) and self.step < self.total:
                    self._save()
                if (number := self._stopping()) and self.step < self.total:
                    if self._saved_step != self.step:
                        self._save()
                    raise Stopped(f"stopped at step {self.step} of {self.total}; {_GO_ON}", number)

    def _learn(self, batch: Any) -> None:
        self._rate = methods.rate_at(self.step, self.recipe.optimizer, self.total, self.step // self._per_epoch)
        methods.set_rate(self.optimizer, self._rate)
        if not self.recipe.optimizer.bias_correction:
            methods.undo_correction(self.optimizer, self.recipe.optimizer, self.step)
        mine, self._share = batch, 1.0
        if not self.processes.alone:  # each takes some items of the same batch; means are weighted by their numbers
            mine, count = _slice(batch, self.processes.index, self.processes.count)
            self._share = count * self.processes.count / len(batch)
        self._gradients(self.task.fetch(mine), mine.length)
        self.optimizer.step()

    def _eager(self, inputs: Inputs, length: int) -> None:
        self.optimizer.zero_grad()
        self._compute({name: x.to(self.device, non_blocking=True) for name, x in inputs.items()}, length)

    def _compute(self, inputs: Inputs, length: int) -> None:
        loss = self.task.loss(self._forward, inputs, length) * self._share
        self.accelerator.backward(loss)
        self.meter.add(loss.detach())

    def _forward(self, *inputs: Any, **settings: Any) -> Any:
        """The model in the training's precision; the loss around it, and evaluations, stay in float32."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.training.precision == "bf16"):
            return self.model(*inputs, **settings)

    # -- looking ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise if a loss since the last look was not finite, and say which was the first."""
        bad = self.meter.first_bad()
        if bad is not None:
            self._diverged(self.step - self.meter.count() + bad + 1, "the loss is not a finite number")

    def _check_all(self) -> None:
        """The losses of every process, and the weights: a finite loss can have gradients that are not."""
        self._merge()
        self._check()
        floats = [x for x in self.bare.state_dict().values() if x.is_floating_point()]
        if not bool(torch.stack([x.isfinite().all() for x in floats]).all()):
            self._diverged(self.step, "its update made weights that are not finite numbers")

    def _diverged(self, step: int, what: str) -> None:
        batch = self.task.order((step - 1) // self._per_epoch)[(step - 1) % self._per_epoch]
        ids = batch.indices.tolist()
        listed = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        told = (
            f"step {step}: {what}; items {listed} of the training set were in the batch. "
            "Nothing of that step is saved. Lower optimizer.lr, set optimizer.clip, or lower method.alpha or "
            f"method.stepsize, and train with another --out ({self.folder.path} keeps its last good checkpoint)"
        )
        self._give_up(told)

    def _give_up(self, told: str) -> NoReturn:
        if self.processes.main:
            self.folder.give_up(told)
        raise DivergedError(told)

    def _merge(self) -> None:
        if not self.processes.alone:
            self.meter.merge(self.accelerator)

    def _log(self) -> None:
        self._merge()
        self._check()
        values = {"epoch": self.step / self._per_epoch, "loss": self.meter.mean()}
        values["lr"] = self._rate
        self.meter.reset()
        self._tell("train", values)
        if heads := self._heads.values():
            self._tell("heads", heads)
            self._watch_for_collapse(values["loss"], heads.get("drive", float("nan")))

    def _watch_for_collapse(self, loss: float, drive: float) -> None:
        told = self._collapse.observe(self.step, loss, drive)
        if not self.recipe.training.stop_collapsed:
            if told and self.processes.main:
                warnings.warn(told, stacklevel=3)
        elif told := next(filter(None, self.processes.gather(told)), None):  # all of them, or some would wait for it
            self._give_up(told)

    def _should_look(self, end_of_epoch: bool) -> bool:
        every = self.recipe.training.evaluate_every
        return self.step == self.total or (self.step % every == 0 if every else end_of_epoch)

    def _look(self) -> None:
        self._check_all()
        found = self._evaluate("dev", quickly=True)
        self._tell("dev", found.metrics)
        value = found.metrics[self.task.select_by]
        if self.best is None or value > self.best["value"]:
            weights = {name: x.detach().clone() for name, x in self.bare.state_dict().items()}
            self.best = {"value": value, "step": self.step, "weights": weights}
        self.bare.train()

    def _evaluate(self, part: str, quickly: bool = False) -> Evaluation:
        self.bare.eval()
        look = getattr(self.task, "look", None) if quickly else None
        with torch.inference_mode():
            found: Evaluation = look(self.bare) if look is not None else self.task.evaluate(self.bare, part)
            return found

    def _tell(self, kind: str, values: dict[str, float]) -> None:
        self.processes.together(lambda: self.folder.log(kind, self.step, values))
        if self.processes.main:
            self.watcher.saw(kind, self.step, values)

    def _evaluated(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Evaluation]]:
        """The result, the weights it belongs to, and the answers on every part."""
        best = self.best
        assert best is not None, "the last step is looked at"
        if averaged := self.average.count:
            best = {"step": self.step, "weights": self.average.weights()}
        self.bare.load_state_dict(best["weights"])
        found = {part: self._evaluate(part) for part in getattr(self.task, "scored", PARTS)}
        self.seconds += time.monotonic() - self._began
        result = {
            "label": self.recipe.label,
            "best_step": best["step"],
            "steps": self.step,
            "seconds": self.seconds,
            **{part: evaluation.metrics for part, evaluation in found.items()},
        }
        if averaged:
            result["averaged"] = averaged
        if notes := found["test"].notes:
            result["notes"] = notes
        return result, best, found

    def _finish(self, result: dict[str, Any], best: dict[str, Any], found: dict[str, Evaluation]) -> dict[str, Any]:
        def write() -> None:
            self.folder.best.save(best["step"], {"model": best["weights"]})
            self.folder.finish(result, {part: evaluation.items for part, evaluation in found.items()})
            self.folder.checkpoints.drop(self.total)  # it had a purpose until there was a result

        self.processes.together(write)
        self.watcher.finished(result)
        return result

    # -- saving and going on ------------------------------------------------------------------------------------

    def _should_save(self, end_of_epoch: bool) -> bool:
        training = self.recipe.training
        if training.save_every:
            return self.step % training.save_every == 0
        if self.step % training.log_every and not end_of_epoch:
            return False  # processes have to agree, which they do where they log
        return bool(self.processes.most(time.monotonic() - self._saved_at >= training.save_seconds))

    def _save(self, spare: int = 0) -> None:
        self._check_all()
        now = time.monotonic()
        everyones = self.processes.gather(random_state())

        def write() -> None:
            state = {
                "model": dict(self.bare.state_dict()),
                "optimizer": unwrap_optimizer(self.optimizer).state_dict(),
                "handle": self.handle.state_dict(),
                "heads": self._heads.values(),
                "random": everyones,
                "parallel": self.processes.parallel,
                "meter": self.meter.state,
                "progress": {"step": self.step, "epoch": self.epoch, "position": self.position},
                "best": self.best,
                "average": self.average.state_dict(),
                "seconds": self.seconds + now - self._began,
            }
            self.folder.sync()
            self.folder.checkpoints.save(self.step, state, spare)

        self.processes.together(write)
        self._saved_at, self._saved_step = now, self.step

    def _resume(self) -> None:
        with warnings.catch_warnings():
            if not self.processes.main:
                warnings.simplefilter("ignore")  # the main process tells
            found = self.folder.checkpoints.latest()
        if found is not None:
            try:
                self._restore(found[1])
            except RepulsiveError:
                raise
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                told = f"its checkpoint is of another training ({why})"
                raise CheckpointError(f"{self.folder.path}: {told}; remove checkpoints/ to start anew") from error
        self.processes.together(lambda: self.folder.rewind(self.step if found is not None else -1))
        self._collapse.read_log(self.folder.lines())

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
        """The signal that came to any process; 0 if none did, or if this is no step at which they ask each other."""
        if not self.processes.alone and self.step % self.recipe.training.log_every:
            return 0
        return self.processes.most(self._request.number or 0)


def _slice(batch: Any, index: int, processes: int) -> tuple[Any, int]:
    """This process's items of a batch, and how many count: one that got none takes one that does not."""
    mine = batch.indices[index::processes]
    if len(mine):
        own = batch.share(index, processes) if hasattr(batch, "share") else dataclasses.replace(batch, indices=mine)
        return own, len(mine)
    return dataclasses.replace(batch, indices=batch.indices[:1]), 0


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"

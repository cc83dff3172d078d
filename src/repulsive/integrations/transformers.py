"""Repulsion and the head monitor in the `Trainer` of transformers, and in those of TRL: one callback each.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[RepulsiveCallback(SVGD(alpha=0.01))])
    trainer = Trainer(model, args, train_dataset=data, callbacks=[MonitorCallback(every=100)])

The Trainer clips, then steps, and the rule acts inside the step: the default `order="clip-repel"` works with any
`max_grad_norm`. A callback cannot act before the Trainer clips. For the other order, disable the Trainer's clipping
and let repulsion clip: `TrainingArguments(max_grad_norm=0)` with `RepulsiveCallback(order="repel-clip", max_norm=1.0)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Unpack

from repulsive import HeadMonitor
from repulsive.errors import RuleError
from repulsive.extras import install_command
from repulsive.integrations.deferred import Deferred
from repulsive.integrations.deferred_monitor import DeferredMonitor
from repulsive.integrations.force_files import with_forces, write_forces
from repulsive.particles.named import RECOMMENDED, RuleName
from repulsive.particles.rule import Rule
from repulsive.repulsion import Handle
from repulsive.repulsion.arguments import RepelSettings

try:
    from transformers import TrainerCallback
except ImportError as error:
    command = install_command("transformers")
    raise ImportError(f"repulsive.integrations.transformers needs transformers: {command}") from error

# Must not be the class name: the Trainer would rebuild a callback of that name from JSON, which cannot store a rule.
STATE_KEY = "repulsive"
MONITOR_KEY = "repulsive_monitor"


class RepulsiveCallback(TrainerCallback):
    """Callback that repels the heads of the Trainer's model during training.

    It attaches when training begins, detaches when it ends, and warns if no step was changed. Each checkpoint's
    `trainer_state.json` contains its state, so `trainer.train(resume_from_checkpoint=...)` resumes with the same
    results. With `space="logits"`, forces that are still in use are in `repulsive.forces` beside it; they are read
    if the checkpoint is in `output_dir`, and computed anew otherwise. It adds the last measurement to the logs:
    `repulsion_ratio` (mean |repulsion| / |drive|), `head_distance`, `head_similarity`, and `repulsion_step`, the
    optimizer step of that measurement. Names of a second callback, in logs and files, end in `_1`, and so on. It warns
    if these values show that the model has collapsed.

    Args:
        rule: a rule or its name, as in `repel`.
        settings: other keyword arguments of `repel`: layers, parts, where, particle, order, max_norm, seed, ...

    Raises:
        UnknownSetting: `repel` has no such argument.
        SelectionError: a word that selects heads is unknown.
        RuleError: the rule or another setting is unknown or out of range; or, in the Trainer, `order="repel-clip"`
            while the Trainer clips, or without any clipping.
    """

    def __init__(self, rule: Rule | RuleName | None = RECOMMENDED, **settings: Unpack[RepelSettings]) -> None:
        self._repulsion = Deferred(rule, settings)

    @property
    def handle(self) -> Handle | None:
        """The handle of `repel`; None before training."""
        return self._repulsion.handle

    @property
    def handles(self) -> list[Handle]:
        """The handle as a list, as in Lightning's callback; empty before training."""
        return self._repulsion.handles

    def add_to(self, trainer: Any) -> None:
        """Add this callback to a trainer before its reporters.

        Reporters from `report_to` run before callbacks from `Trainer(callbacks=...)` and would miss what this one logs.

        Args:
            trainer: a `Trainer` created without this callback.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check_clipping(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check_clipping(args)  # a callback added later has missed `on_init_end`
        callbacks = vars(state).setdefault("_repulsive", [])  # all RepulsiveCallbacks of this training, in order
        if self not in callbacks:
            callbacks.append(self)
        self._suffix = f"_{callbacks.index(self)}" if callbacks.index(self) else ""
        self._key = f"{STATE_KEY}{self._suffix}"
        saved = state.stateful_callbacks.get(self._key)
        if saved is not None and _is_loaded_from(folder := _checkpoint(args, state), state, self._key):
            saved = with_forces(folder / f"{self._key}.forces", saved)
        self._repulsion.begin(kwargs["model"], [(kwargs["optimizer"], {})], saved, resumed=state.global_step > 0)
        self._store(state)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._store(state)  # at every step, because `on_save` runs after `trainer_state.json` was written

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if args.should_save and folder.is_dir():
            write_forces(folder / f"{self._key}.forces", self._repulsion.states())

    def _store(self, state: Any) -> None:
        """Store the states of the handles where the Trainer writes them to JSON."""
        state.stateful_callbacks[self._key] = self._repulsion.states(tensors=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return  # an evaluation log, or the final summary
        values = self._repulsion.measurements(state.global_step, float(logs["loss"]))
        measured = {f"{name}{self._suffix}": value for name, value in values.items()}
        logs.update(measured)
        if state.log_history:
            state.log_history[-1].update(measured)  # a copy made before this callback runs

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._repulsion.end()

    def _check_clipping(self, args: Any) -> None:
        if self._repulsion.order != "repel-clip":
            return
        if args.max_grad_norm and args.max_grad_norm > 0:
            raise RuleError(
                f"order='repel-clip' is not possible while the Trainer clips (max_grad_norm={args.max_grad_norm}), "
                "because it clips before any callback. Set TrainingArguments(max_grad_norm=0) and pass max_norm=... to "
                "the callback"
            )
        if self._repulsion.settings.get("max_norm") is None:
            raise RuleError("order='repel-clip' with max_grad_norm=0 clips nothing: pass max_norm=... to the callback")


def _checkpoint(args: Any, state: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of the current step. The Trainer does not tell which it loads."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _is_loaded_from(folder: Path, state: Any, key: str) -> bool:
    """Check whether the Trainer has loaded its state from a folder, or from a copy of it."""
    try:
        saved = json.loads(Path(folder, "trainer_state.json").read_text(encoding="utf-8"))
        found = saved["log_history"], saved["stateful_callbacks"][key]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return json.dumps(found) == json.dumps((state.log_history, state.stateful_callbacks[key]))


class MonitorCallback(TrainerCallback):
    """Callback that monitors the heads of the Trainer's model during training; see `HeadMonitor`.

    The values over all layers are added to the logs (`heads/similarity`, `heads/entropy`, ...) with the step of the
    measurement (`heads/step`). Each checkpoint's `trainer_state.json` contains the state of the monitor.

    Args:
        settings: keyword arguments of `HeadMonitor`, such as `every`; `page` and `film`: paths of the live page and of
            the film to write.

    Raises:
        UnknownSetting: `HeadMonitor` has no such argument.
    """

    def __init__(self, **settings: Any) -> None:
        self._deferred = DeferredMonitor(settings)
        self._saved_step = -1  # step of the measurement in the state

    @property
    def monitor(self) -> HeadMonitor | None:
        """The monitor; None before training."""
        return self._deferred.monitor

    def add_to(self, trainer: Any) -> None:
        """Add this callback to a trainer before its reporters, so that they receive its values."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved_step = -1
        self._deferred.begin(kwargs["model"], state.global_step, state.stateful_callbacks.get(MONITOR_KEY))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.end_step(state.global_step)
            self._save(state)

    def _save(self, state: Any) -> None:
        """Store the state of the monitor for the next checkpoint, if it has changed."""
        assert self.monitor is not None
        latest = self.monitor.history[-1].step if len(self.monitor.history) else -1
        if latest != self._saved_step:
            self._saved_step = latest
            state.stateful_callbacks[MONITOR_KEY] = self.monitor.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            values = self._deferred.new_values()
            logs.update(values)
            if state.log_history:
                state.log_history[-1].update(values)  # a copy made before this callback runs

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._deferred.end()

"""Repulsion and the head monitor in Lightning: one callback each, for `lightning.pytorch` or `pytorch_lightning`.

    Trainer(callbacks=[RepulsiveCallback(SVGD(alpha=0.01))], gradient_clip_val=1.0)
    Trainer(callbacks=[MonitorCallback(every=100)])

Lightning passes the optimizer a closure that runs backward, `on_before_optimizer_step` and clipping. By default
(`order="clip-repel"`) the rule acts on the gradients after the closure. With `order="repel-clip"` it acts in
`on_before_optimizer_step`, before Lightning clips (`gradient_clip_val`, `configure_gradient_clipping`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor
from torch.optim import Optimizer

from repulsive import HeadMonitor
from repulsive.errors import RuleError, warn_user
from repulsive.extras import install_command
from repulsive.heads import find_heads
from repulsive.heads.layout import HeadGroup
from repulsive.integrations.deferred import Deferred
from repulsive.integrations.deferred_monitor import DeferredMonitor
from repulsive.particles.named import RECOMMENDED, RuleName
from repulsive.particles.rule import Rule
from repulsive.repulsion import Handle, unwrap_optimizer
from repulsive.repulsion.arguments import RepelSettings
from repulsive.repulsion.checks import SELECTION, check_apart, check_groups, refuse_single_heads, resolve_rule
from repulsive.repulsion.trained_groups import parameter_ids

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        command = install_command("lightning")
        raise ImportError(f"repulsive.integrations.lightning needs lightning: {command}") from error


class RepulsiveCallback(Callback):
    """Callback that repels the heads of a LightningModule during `fit`.

    It attaches to each optimizer that owns heads, detaches at the end, and warns if no step was changed. Lightning's
    checkpoints contain its state, so `fit(ckpt_path=...)` resumes with the same results. Every `log_every_n_steps` it
    logs the last measurement: `repulsion_ratio` (mean |repulsion| / |drive|), `head_distance`, `head_similarity`, and
    `repulsion_step`, the optimizer step of that measurement. It warns if these values show that the model has
    collapsed.

    Args:
        rule: a rule or its name, as in `repel`.
        settings: other keyword arguments of `repel`: layers, parts, where, particle, order, max_norm, seed, ...

    Raises:
        UnknownSetting: `repel` has no such argument.
        SelectionError: a word that selects heads is unknown.
        RuleError: the rule or another setting is unknown or out of range; or, in `fit`, `order="repel-clip"` under
            manual optimisation without `max_norm`: Lightning does not clip there.
    """

    def __init__(self, rule: Rule | RuleName | None = RECOMMENDED, **settings: Unpack[RepelSettings]) -> None:
        super().__init__()
        self._repulsion = Deferred(rule, settings)
        self._saved: list[dict[str, Any]] | None = None

    @property
    def handle(self) -> Handle | None:
        """The handle of `repel`; None before training. With several optimizers use `handles`."""
        return self._repulsion.handle

    @property
    def handles(self) -> list[Handle]:
        """One handle per optimizer that owns heads; empty before training."""
        return self._repulsion.handles

    def state_dict(self) -> dict[str, Any]:
        return {"handles": self._repulsion.states()} if self.handles else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["handles"]  # Lightning restores optimizers after callbacks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._saved = None  # may be left from an evaluation with `ckpt_path`

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._check_clipping(trainer, pl_module)
        targets: list[tuple[Any, dict[str, Any]]] = [(optimizer, {}) for optimizer in trainer.optimizers]
        if len(targets) > 1:
            groups = self._groups(pl_module)
            targets = [(optimizer, {"groups": own}) for optimizer, own in _assign(groups, trainer.optimizers)]
        if self._repulsion.settings.get("max_norm") is None:  # `on_before_optimizer_step` implements "repel-clip"
            targets = [(optimizer, {**own, "order": "clip-repel"}) for optimizer, own in targets]
        self._repulsion.begin(pl_module, targets, self._saved, resumed=trainer.ckpt_path is not None)
        self._saved = None

    def _groups(self, pl_module: Any) -> list[HeadGroup]:
        """Return the groups of all optimizers together; `repel` checks those of one optimizer at a time."""
        settings = self._repulsion.settings
        if settings.get("groups") is not None:
            groups = check_groups(settings["groups"])
        else:
            groups = find_heads(pl_module, **{name: settings[name] for name in SELECTION if name in settings})
            refuse_single_heads(resolve_rule(self._repulsion.rule), groups)
        check_apart(groups)
        return groups

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._repulsion.order == "repel-clip":
            for handle in self.handles:
                if handle.optimizer is unwrap_optimizer(optimizer):
                    # A fused optimizer unscales gradients inside its step, so the handle needs the scaler.
                    handle.apply(getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        every = trainer.log_every_n_steps  # 0 disables logging
        if every and trainer.global_step % every == 0:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            # Under manual optimisation a step may return anything.
            value = float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan
            pl_module.log_dict(self._repulsion.measurements(trainer.global_step, value))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._repulsion.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._repulsion.detach()

    def _check_clipping(self, trainer: Any, pl_module: Any) -> None:
        if self._repulsion.order != "repel-clip" or self._repulsion.settings.get("max_norm") is not None:
            return
        if not pl_module.automatic_optimization:
            raise RuleError(
                "order='repel-clip' under manual optimisation needs max_norm: Lightning does not clip there, and your "
                "own clipping comes before the rule. Pass max_norm=... to the callback and remove your own clipping"
            )
        defined_in = type(pl_module).configure_gradient_clipping.__module__.partition(".")[0]
        is_own = defined_in not in ("lightning", "pytorch_lightning")  # the module may clip by a method of its own
        if not trainer.gradient_clip_val and not is_own:
            warn_user(
                "order='repel-clip' has no effect, because Lightning does not clip here; set gradient_clip_val of the "
                "Trainer, or pass max_norm=... to the callback"
            )


class MonitorCallback(Callback):
    """Callback that monitors the heads of a LightningModule during `fit`; see `HeadMonitor`.

    It logs the values over all layers after each measurement (`heads/similarity`, `heads/entropy`, ...) with its step
    (`heads/step`). Lightning's checkpoints contain its state.

    Args:
        settings: keyword arguments of `HeadMonitor`, such as `every`; `page` and `film`: paths of the live page and of
            the film to write.

    Raises:
        UnknownSetting: `HeadMonitor` has no such argument.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._deferred = DeferredMonitor(settings)
        self._saved: dict[str, Any] | None = None

    @property
    def monitor(self) -> HeadMonitor | None:
        """The monitor; None before training."""
        return self._deferred.monitor

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._deferred.begin(pl_module, trainer.global_step, self._saved)
        self._saved = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is not None:
            self.monitor.begin_step(trainer.global_step)
            if self.monitor.modules == (pl_module,):  # `training_step` runs its layers, but does not call the module
                self.monitor.start_pass(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.monitor is not None and self.monitor.modules == (pl_module,):
            self.monitor.finish_pass()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.end_step(trainer.global_step)
            if values := self._deferred.new_values():
                pl_module.log_dict(values, rank_zero_only=True)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._deferred.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._deferred.cancel()


def _assign(groups: Sequence[HeadGroup], optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, list[HeadGroup]]]:
    """Assign each group to the optimizer that owns it. Unowned groups go to the first, where `repel` reports them."""
    owned = [parameter_ids(optimizer) for optimizer in optimizers]
    owners = [
        next((i for i, ids in enumerate(owned) if any(id(p) in ids for p in group.parameters())), None)
        for group in groups
    ]
    first = next((owner for owner in owners if owner is not None), 0)
    assigned: dict[int, list[HeadGroup]] = {}
    for group, owner in zip(groups, owners, strict=True):
        assigned.setdefault(first if owner is None else owner, []).append(group)
    return [(optimizers[index], own) for index, own in sorted(assigned.items())]

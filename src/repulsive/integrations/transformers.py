"""Repulsion in the `Trainer` of transformers: one callback.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[RepulsiveCallback(SVGD(alpha=0.01))])

The Trainer clips, then steps; the rule acts inside the step. So `order="clip-repel"`, the default, is what happens with
`max_grad_norm` as it is. There is no place for a callback before the Trainer's clipping: for the other order switch
that off and let repulsion clip, `TrainingArguments(max_grad_norm=0)` with `RepulsiveCallback(order="repel-clip",
max_norm=1.0)`.
"""

from __future__ import annotations

from typing import Any

from repulsive.errors import RuleError
from repulsive.integrations.deferred import Deferred
from repulsive.particles.named import RuleName
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion import Handle

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        'repulsive.integrations.transformers needs transformers: pip install "repulsive[transformers]"'
    ) from error

# Not the name of a class: the Trainer would rebuild a callback of that name from JSON, and a rule has none.
STATE_KEY = "repulsive"


class RepulsiveCallback(TrainerCallback):
    """Repels the heads of the Trainer's model while it trains.

    Attaches when training begins, detaches when it ends, and warns if no step was changed. Its state is part of each
    checkpoint's `trainer_state.json`, so `trainer.train(resume_from_checkpoint=...)` goes on with the same numbers,
    wherever the checkpoint lies. Logs gain `repulsion_ratio` (mean |repulsion| / |drive|), `head_distance` and
    `head_similarity`, as last measured, and `repulsion_step`, the optimizer step of that measurement. Where these logs
    show that the model has collapsed, it warns.

    Args:
        rule: as in `repel`, a name too.
        settings: any other argument of `repel`, by name: layers, parts, where, particle, order, max_norm, seed, ...

    Raises:
        UnknownSetting: `repel` has no such argument.
        RuleError: `order="repel-clip"` while the Trainer clips, or while nothing does (raised by the Trainer).
    """

    def __init__(self, rule: Rule | RuleName | None = SVGD(), **settings: Any) -> None:  # noqa: B008  rules are frozen
        self._repulsion = Deferred(rule, settings)

    @property
    def handle(self) -> Handle | None:
        """What `repel` returned; readable after training too, None before."""
        return self._repulsion.handle

    @property
    def handles(self) -> list[Handle]:
        """The same as a list, as in Lightning's callback; empty before training."""
        return self._repulsion.handles

    def add_to(self, trainer: Any) -> None:
        """Join a trainer ahead of its reporters.

        Those that come with `report_to` are called before `Trainer(callbacks=...)`, and do not see what it logs.

        Args:
            trainer: a `Trainer` that was made without this callback.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check_clipping(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check_clipping(args)  # callbacks added later have missed `on_init_end`
        begun = vars(state).setdefault("_repulsive", [])  # callbacks of this training, in their order
        if self not in begun:
            begun.append(self)
        self._key = f"{STATE_KEY}_{begun.index(self)}" if begun.index(self) else STATE_KEY
        saved = state.stateful_callbacks.get(self._key)
        self._repulsion.begin(kwargs["model"], [(kwargs["optimizer"], {})], saved, resumed=state.global_step > 0)
        state.stateful_callbacks[self._key] = self._repulsion.states(tensors=False)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # At every step, because `on_save` comes when the checkpoint is written already.
        state.stateful_callbacks[self._key] = self._repulsion.states(tensors=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return  # of an evaluation, or the summary at the end
        measured = self._repulsion.look(state.global_step, float(logs["loss"]))
        logs.update(measured)
        if state.log_history:
            state.log_history[-1].update(measured)  # a copy, made before this callback is asked

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._repulsion.end()

    def _check_clipping(self, args: Any) -> None:
        if self._repulsion.order != "repel-clip":
            return
        if args.max_grad_norm and args.max_grad_norm > 0:
            raise RuleError(
                f"order='repel-clip' cannot be had while the Trainer clips (max_grad_norm={args.max_grad_norm}): it "
                "does so before any callback acts. Set TrainingArguments(max_grad_norm=0) and give max_norm=... here"
            )
        if self._repulsion.settings.get("max_norm") is None:
            raise RuleError("order='repel-clip' with max_grad_norm=0 clips nothing: give max_norm=... to the callback")

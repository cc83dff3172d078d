"""`HeadMonitor`: measure the heads of a model every few training steps, and warn about problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Never, Self

import torch
from torch import nn

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.errors import HeadLayoutError, SelectionError, StateError, check_whole, list_first, warn_user
from repulsive.heads.describe import count_of
from repulsive.heads.module_paths import check_model, unwrap
from repulsive.heads.trace.forward_pass import without_compilation
from repulsive.monitoring.film_layers import film_layers
from repulsive.monitoring.history import History
from repulsive.monitoring.live_page import page_content
from repulsive.monitoring.measurement import Measurement
from repulsive.monitoring.monitored_heads import find_monitored_heads, move_tensors
from repulsive.monitoring.problems import Detector, HeadWarning, Problem, Thresholds
from repulsive.monitoring.recording import HeadRecorder
from repulsive.monitoring.training_pass import TrainingPass, is_first_rank
from repulsive.pages.html.document import write_whole
from repulsive.pages.html.film import film
from repulsive.pages.monitor_page import write_monitor_page

Log = Callable[[Mapping[str, float], int], None]
MISSED = 3  # steps without a training pass before the monitor warns
_NO_STEP = "the head monitor measured the first pass only: call its step() after each optimizer step"


class HeadMonitor:
    """Monitor of the heads of any model, in any training loop, with or without repulsion.

    Every `every` steps it measures the next training pass, from its own batch: for each head the entropy of its
    attention, its largest attention logit and the size of what it writes; for each layer the similarity of heads in
    their attention logits and of tokens after the layer. The pass itself does not change: gradients and random numbers
    stay the same. Hooks exist only in the steps that measure. Passes in evaluation mode or without gradients are not
    measured, nor is the recomputation of activation checkpointing. In a distributed training only rank 0 measures.
    A compiled model runs the measured pass without its compiled code.

    Each problem is a `HeadWarning`, once: duplicate heads, dead heads, saturated attention, equal tokens.

    Args:
        model: any module with heads that `find_heads` finds, wrapped or not.
        every: number of steps between two measurements.
        probe: a fixed batch to measure on instead of training batches: a tensor, a tuple of arguments or a mapping. The
            model runs on it in evaluation mode, without gradients.
        example_inputs: inputs of the model, to find the heads of a class that `find_heads` does not know; by default
            the probe.
        log: a logger with `log(values, step)`, or a function that takes the same; None: no logging.
        thresholds: when to warn.
        items: maximum number of items of a batch that are measured, from the first on.
        tokens: maximum number of tokens of these items on which attention logits are compared.

    Attributes:
        history: measurements so far; after 100 the older ones are thinned.
        steps: number of optimizer steps done.
        is_measuring: False on ranks other than 0.
        is_open: False after `close`.
        modules: the modules that contain all attention layers; calling one of them in training is a pass.

    Raises:
        SelectionError: `every`, `items` or `tokens` is not a whole number above 0, `model` is not a model, `thresholds`
            are not `Thresholds`, or `log` is not a logger.
        NoHeadsFound: the model has no heads.
        UnsupportedWeights: there is a probe, and weights are sharded.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        >>> with HeadMonitor(model, every=2) as monitor:
        ...     for step in range(5):
        ...         _ = model(torch.randn(3, 6, 8)).sum().backward()
        ...         monitor.step()
        >>> [measurement.step for measurement in monitor.history]
        [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        probe: object = None,
        example_inputs: object = None,
        log: Any = None,
        thresholds: Thresholds | None = None,
        items: int = 8,
        tokens: int = 1024,
    ) -> None:
        for name, value in (("every", every), ("items", items), ("tokens", tokens)):
            check_whole(name, value)
        if thresholds is not None and not isinstance(thresholds, Thresholds):
            raise SelectionError(f"thresholds={thresholds!r}: expected Thresholds(...), such as Thresholds(dead=0.01)")
        check_model(model)
        if log is not None and not callable(log) and not callable(getattr(log, "log", None)):
            raise SelectionError("log must have a method log(values, step), or be a function that takes the same")
        self.model, self.every, self._probe = model, every, probe
        self._log: Log | None = getattr(log, "log", log)
        groups, out = find_monitored_heads(model, example_inputs, probe)
        self._recorder = HeadRecorder(model, groups, out=out, items=items, tokens=tokens)
        self._pass = TrainingPass(model, self._recorder, self._process)
        self._detector = Detector(thresholds or Thresholds())
        self.history = History()
        self.steps = 0
        self._listeners: list[Callable[[], None]] = []
        self._warned: set[str] = set()
        self._measured = -1  # step of the last measurement
        self.is_measuring, self.is_open = is_first_rank(), True
        self.modules = tuple(self._recorder.path)
        self.begin_step(0)

    @property
    def problems(self) -> list[Problem]:
        """Problems so far, each with its message."""
        return self._detector.problems

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, number: int | None = None) -> None:
        """Count one optimizer step. Call it after each one.

        Args:
            number: number of steps done; None: the monitor counts.
        """
        self.end_step(self.steps + 1 if number is None else number)
        self.begin_step(self.steps)

    def begin_step(self, number: int) -> None:
        """Prepare to measure the next training pass if it is due. For callbacks; `step` calls it.

        Args:
            number: number of optimizer steps done.
        """
        self.steps = number
        is_due = (number % self.every == 0 and number != self._measured) or self._pass.missed > 0
        if self._probe is None and is_due and self.is_measuring and self.is_open:
            self._pass.wait(number)

    def end_step(self, number: int) -> None:
        """Note that an optimizer step is done, and measure the probe if it is due. For callbacks; `step` calls it.

        Args:
            number: number of optimizer steps done.
        """
        self.steps = number
        if self._pass.is_awaited:
            self._pass.count_missed()
            self._warn_about_missed_passes()
        is_due = number % self.every == 0 and number != self._measured
        if self._probe is not None and is_due and self.is_measuring and self.is_open:
            self.measure()

    def start_pass(self, batch: object = None) -> None:
        """Start measuring a training pass, if it is due. For loops that call parts of the model, but never all of it.

        Args:
            batch: inputs of the pass; padding is read from a mapping.
        """
        if self._pass.is_awaited:
            self._pass.start(batch if isinstance(batch, Mapping) else {})

    def finish_pass(self) -> None:
        """Finish what `start_pass` began; call it before the backward pass."""
        self._pass.finish()

    def measure(self) -> Measurement:
        """Measure now on the probe, in evaluation mode and without gradients.

        Raises:
            SelectionError: the monitor has no probe.
            HeadLayoutError: the probe does not reach any attention layer.
        """
        if self._probe is None:
            raise SelectionError("measure() needs a batch: HeadMonitor(model, probe=batch)")
        model = unwrap(self.model)
        parameter = next(model.parameters(), None)
        batch = self._probe if parameter is None else move_tensors(self._probe, parameter.device)
        inputs = dict(batch) if isinstance(batch, Mapping) else {}
        with (
            torch.no_grad(),
            without_compilation(),
            evaluating(model),
            self._recorder.recording(inputs, self.steps) as result,
        ):
            call(model, batch)
        measurement = result.finish()
        if not measurement.layers:
            raise HeadLayoutError("the probe did not reach any attention layer; pass inputs as the model takes them")
        self._process(measurement)
        return measurement

    def close(self) -> None:
        """Remove all hooks, and update pages; the history stays readable. Warn if `step` was never called."""
        if self._probe is None and len(self.history) and not self.steps:
            self._warn_once(_NO_STEP)
        self._pass.cancel()
        self.is_open = False
        for listener in self._listeners:
            listener()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._warned.add(_NO_STEP)  # the error is the reason
        self.close()

    def __repr__(self) -> str:
        counts = f"{count_of(len(self.history), 'measurement')}, {count_of(len(self.problems), 'problem')}"
        closed = "" if self.is_open else ", closed"
        return f"<repulsive.HeadMonitor: {type(unwrap(self.model)).__name__}, step {self.steps}, {counts}{closed}>"

    # -- results ------------------------------------------------------------------------------------------------

    def _process(self, measurement: Measurement) -> None:
        """Store and log a measurement, and warn about problems."""
        self.history.add(measurement)
        self._measured = measurement.step
        for problem in self._detector.observe(measurement):
            warn_user(problem.message, HeadWarning)
        self._warn_about_missing_values()
        if self._log is not None:
            self._log(measurement.values(), measurement.step)
        for listener in self._listeners:
            listener()

    def _warn_about_missing_values(self) -> None:
        """Warn once about each quantity that cannot be measured."""
        for (quantity, reason), labels in self._recorder.missing_values().items():
            message = f"{quantity} not measured ({list_first(labels, 3)}): {reason}"
            self._warn_once(message, key=f"{quantity}: {reason}")

    def _warn_once(self, message: str, key: str = "") -> None:
        if (key or message) not in self._warned:
            self._warned.add(key or message)
            warn_user(message, HeadWarning)

    def _warn_about_missed_passes(self) -> None:
        if self._pass.missed == MISSED:
            module = type(self._recorder.path[-1]).__name__
            warn_user(
                f"the head monitor measured nothing in {MISSED} steps: no training pass called {module} as a module, "
                "in training mode and with gradients. Call the model itself, or pass a fixed batch: "
                "HeadMonitor(model, probe=batch)",
                HeadWarning,
            )

    # -- pictures -----------------------------------------------------------------------------------------------

    def page(self, path: str | Path, *, title: str = "Heads during training") -> Path:
        """Write a self-contained page with curves and warnings, and rewrite it after every measurement.

        While training runs, the open page reloads itself every few seconds. `close` writes it for the last time.

        Args:
            path: the HTML file; its folder is created.
            title: heading of the page.

        Returns:
            The path.
        """

        def write() -> None:
            if not self.is_measuring:
                return
            content = page_content(
                self.history,
                self.problems,
                title=title,
                every=self.every,
                thresholds=self._detector.thresholds,
                is_live=self.is_open,
            )
            write_monitor_page(path, content)

        def update() -> None:
            try:
                write()
            except OSError as error:  # a full disk must not stop the training
                self._warn_once(f"{str(path)!r}: cannot be written ({error.strerror}); the page is not up to date")

        write()
        self._listeners.append(update)
        return Path(path)

    def film(self, path: str | Path, *, title: str = "How heads moved") -> Path:
        """Write an animated SVG of the heads of each layer, in a plane where close heads have similar attention logits.

        Args:
            path: the SVG file; its folder is created.
            title: title of the film.

        Returns:
            The path.

        Raises:
            SelectionError: fewer than two measurements have a layer with two comparable heads.
        """
        return write_whole(path, film(title, *film_layers(self.history)))

    # -- state --------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return this monitor: a copied model is not monitored, and refers to the monitor of the original.

        Raises:
            StateError: the monitor itself is copied.
        """
        if not memo:
            self.__reduce_ex__(None)
        return self

    def __reduce_ex__(self, protocol: object) -> Never:
        raise StateError(
            "a monitor cannot be pickled or copied, because its hooks belong to one model: save monitor.state_dict(), "
            "and load it into a new HeadMonitor. Keep the monitor out of objects that are pickled"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return steps, history and problems as lists and numbers, for a checkpoint; JSON can store it."""
        return {
            "version": 1,
            "steps": self.steps,
            "history": self.history.state_dict(),
            "problems": self._detector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            StateError: the state has another version or is damaged, or belongs to a model with other layers.
        """
        if state.get("version") != 1 or not isinstance(state.get("steps"), int):
            raise StateError(f"version {state.get('version')!r} of the head monitor's state is unknown; expected 1")
        history = History()
        history.load_state_dict(state.get("history", ()))
        other = {layer.name for each in history for layer in each.layers} - {x.name for x in self._recorder.layers}
        if other:
            raise StateError(f"the state of the head monitor belongs to a model with other layers: {min(other)!r}")
        self._detector.load_state_dict(state.get("problems", {}))
        self.history, self._measured = history, history[-1].step if history else -1
        self._pass.cancel()
        self.begin_step(state["steps"])

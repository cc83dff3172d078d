"""The interface between the training loop and a task.

A task defines the model, the batches, the loss and the evaluation of one system on one dataset. `Task` lists what it
must define, and has a default for everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from repulsive.errors import ConfigError
from repulsive.lab.engine.reporting import Examples, Measured, ReportOptions, measure_weights

Inputs = dict[str, Tensor]
Forward = Callable[..., Any]  # calls the model
_ATTRIBUTES = ("num_data", "select_by", "shown", "checksums")


class Batch(Protocol):
    """Training items of one step."""

    indices: Tensor  # int64 [B], indices of the training items
    length: int  # padded length: together with B it determines all shapes

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Evaluation:
    """Results of a model on a data split.

    Args:
        metrics: name -> number.
        items: name -> tensor [N, ...] in the order of the data, for paired comparisons: at least `correct` and `nll`.
        notes: remarks on a metric, such as the signature of a BLEU score; they are written to `result.json`.
    """

    metrics: dict[str, float]
    items: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class Task(ABC):
    """One system on one dataset.

    Batches and inputs must be functions of the recipe's seed and the epoch alone: a resumed training repeats them.

    Attributes without a default, and abstract methods, are required. The loop also takes a class that does not inherit
    from `Task`, see `as_task`.
    """

    num_data: int  # number of training items, N of the rules
    select_by: str  # metric of the development set that selects the best weights; higher is better
    shown: Sequence[str]  # metrics that the live table shows
    checksums: Mapping[str, str]  # data file -> SHA-256; a run is resumed only with the same data

    scored_parts: Sequence[str] = ("dev", "test")  # evaluated in full after training; must include these two
    dataset: str = ""  # name of the dataset, for titles
    has_data: bool = True  # False after `restore`
    has_calibration: bool = False  # reports show calibration and entropy of the stored logits
    has_bleu: bool = False  # reports can measure ablations by BLEU

    # -- training -----------------------------------------------------------------------------------------------

    @abstractmethod
    def model(self) -> nn.Module:
        """Initialise a model with torch's global random generator."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the data that are kept on the device."""

    @abstractmethod
    def order(self, epoch: int) -> Sequence[Any]:
        """Return the batches of an epoch, each a `Batch`."""

    @abstractmethod
    def fetch(self, batch: Any) -> Inputs:
        """Return the tensors of a batch, on the CPU."""

    @abstractmethod
    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        """Compute the mean loss over the items of a batch, on the device.

        This method must not synchronise with the device, because the loop may capture it as a CUDA graph.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        """Evaluate a model, in evaluation mode, on "dev", "test" or another data split."""

    def validate(self, model: nn.Module) -> Evaluation:
        """Evaluate on the development set during training; override it if a full evaluation takes long.

        The metrics must include `select_by`.
        """
        return self.evaluate(model, "dev")

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """Return parameter name -> factor of its learning rate; the factor of other parameters is 1."""
        return {}

    def repelled(self, model: nn.Module) -> nn.Module:
        """Return the submodule to whose heads the recipe's method applies."""
        return model

    # -- what a run folder keeps --------------------------------------------------------------------------------

    def assets(self) -> dict[str, bytes]:
        """Return small files that a trained model needs, by name: vocabulary, tokenizer, class names.

        They are copied into the run folder when training starts. `restore` reads them.
        """
        return {}

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Task:
        """Make the task of a trained model from its assets, without opening its data.

        Such a task has `has_data = False`. It makes models; it has no batches and evaluates nothing.
        """
        raise NotImplementedError(f"{cls.__name__} has no restore()")

    # -- what a report shows ------------------------------------------------------------------------------------

    def facts(self) -> list[tuple[str, str]]:
        """List facts about the data as (name, value) pairs, for the top of a report."""
        return []

    def measure_heads(self, model: nn.Module, options: ReportOptions) -> Measured:
        """Measure the heads of a trained model; the default compares their weights."""
        return measure_weights(model)

    def examples(self, part: str, models: Mapping[str, nn.Module]) -> Examples:
        """Collect the attention of some models (method -> model, on the CPU) on a few items of a data split."""
        return Examples()

    def open_foreign(self, folder: Path, part: str) -> Any:
        """Read a split of another prepared dataset with this task's vocabulary, for `ReportOptions.foreign`.

        Raises:
            ConfigError: the task has no use for foreign data.
        """
        raise ConfigError("--foreign compares how confident classifiers are; these runs are of another task")


class DeviceTask(Task):
    """A task whose data splits all fit on the device, so that a batch copies only its indices there.

    Subclasses set `parts` in their constructor.
    """

    parts: dict[str, Any]  # name of a split -> its data, which have a method `to`
    _device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        self._device = device
        self.parts = {name: part.to(device) for name, part in self.parts.items()}


def as_task(task: Any) -> Task:
    """Return an object that has all members of `Task`.

    Args:
        task: a `Task`, or an object of any class that has the required members. Optional members that it lacks have
            the defaults of `Task`.

    Raises:
        ConfigError: required members are missing.
    """
    if isinstance(task, Task):
        return task
    missing = [name for name in (*_ATTRIBUTES, *sorted(Task.__abstractmethods__)) if not hasattr(task, name)]
    if missing:
        raise ConfigError(f"task {type(task).__name__}: missing {', '.join(missing)}; see Task in lab/engine/task.py")
    return _Adapter(task)  # type: ignore[abstract]


class _Adapter(Task):
    """Wrapper that adds the defaults of `Task` to an object whose class does not inherit from `Task`."""

    def __init__(self, task: Any) -> None:
        for name in (*_ATTRIBUTES, *(name for name in vars(Task) if not name.startswith("_"))):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))


_Adapter.__abstractmethods__ = frozenset()  # every instance has these methods as attributes

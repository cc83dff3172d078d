"""The interface of tasks: defaults, and classes that do not inherit from it."""

import dataclasses

import pytest
import torch

from repulsive.errors import ConfigError
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Task, as_task
from repulsive.lab.systems.registry import make_task
from tests.lab.engine import tiny


class Plain:
    """The required members alone, of a task that works."""

    num_data = property(lambda self: self._task.num_data)
    select_by, shown = "accuracy", ("accuracy",)

    def __init__(self, recipe):
        self._task = make_task(recipe)
        self.checksums = self._task.checksums

    def model(self):
        return self._task.model()

    def to(self, device):
        self._task.to(device)

    def order(self, epoch):
        return self._task.order(epoch)

    def fetch(self, batch):
        return self._task.fetch(batch)

    def loss(self, model, inputs, length):
        return self._task.loss(model, inputs, length)

    def evaluate(self, model, part):
        return self._task.evaluate(model, part)


class Slow(Plain):
    """Half the rate for one parameter, and a cheaper evaluation while training."""

    scored_parts = ("dev", "test", "train")

    def rate_factors(self, model):
        return {next(name for name, _ in model.named_parameters()): 0.5}

    def validate(self, model):
        evaluation = self._task.evaluate(model, "dev")
        return dataclasses.replace(evaluation, metrics={"accuracy": evaluation.metrics["accuracy"]})


def loop(task, recipe, folder):
    return Loop(task, recipe, RunFolder(folder), Watcher(), "cpu")


def test_a_class_of_its_own_trains_to_the_same_bits(data, tmp_path):
    recipe = tiny.recipe(data)
    loop(Plain(recipe), recipe, tmp_path / "plain").run()
    tiny.train(data, tmp_path / "task")
    tiny.assert_same(tmp_path / "plain", tmp_path / "task")


def test_optional_members_of_such_a_class_are_used(data, tmp_path):
    recipe = tiny.recipe(data, "training.epochs=1")
    made = loop(Slow(recipe), recipe, tmp_path)
    result = made.run()
    assert {"dev", "test", "train"} <= result.keys()
    assert [group.get("factor") for group in made.optimizer.param_groups] == [0.5, 1.0]
    (line,) = [line for line in made.folder.lines() if line["kind"] == "dev"]
    assert line.keys() == {"kind", "step", "accuracy"}


def test_what_is_missing_is_named():
    class Half:
        num_data, select_by, shown = 1, "accuracy", ()

        def model(self):
            return torch.nn.Linear(1, 1)

    with pytest.raises(ConfigError, match="task Half: missing checksums, evaluate, fetch, loss, order, to; see Task"):
        as_task(Half())


def test_the_defaults(data):
    task = as_task(Plain(tiny.recipe(data)))
    model = task.model()
    assert isinstance(task, Task) and as_task(task) is task
    assert task.repelled(model) is model and task.rate_factors(model) == {} and task.assets() == {}
    assert tuple(task.scored_parts) == ("dev", "test") and task.facts() == [] and task.has_data
    assert len(task.measure_heads(model, None).weights) == 1
    with pytest.raises(ConfigError, match="--foreign"):
        task.open_foreign(None, "test")

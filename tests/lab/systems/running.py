"""Recipes trained to their end, and checks of a loss, as every toy task needs them."""

import pytest
import torch

from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import make_task, open_recipe


def loop(recipe, folder, watcher=None, device="cpu"):
    return Loop(make_task(recipe), recipe, RunFolder(folder), watcher or Watcher(), device)


def train(recipe, folder, watcher=None, device="cpu"):
    made = loop(recipe, folder, watcher, device)
    try:
        made.run()
    finally:
        made.folder.close()
    return made


class ToyRecipe:
    """A recipe in a file of the data's folder, with changes."""

    def __init__(self, name):
        self.name = name

    def path(self, data):
        return data / self.name

    def open(self, data, *more):
        return open_recipe(self.path(data), more)

    def loop(self, data, folder, *more, watcher=None):
        return loop(self.open(data, *more), folder, watcher)

    def train(self, data, folder, *more, watcher=None):
        return train(self.open(data, *more), folder, watcher)


def check_the_loss_never_waits(task):
    """Run a training step on the device "meta", whose tensors have no values: code that waits for one fails."""
    batch = task.order(0)[0]
    model = task.model().to("meta")
    task.to(torch.device("meta"))
    inputs = {name: x.to("meta") for name, x in task.fetch(batch).items()}
    loss = task.loss(model, inputs, batch.length)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        float(loss.detach())

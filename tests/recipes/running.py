"""A recipe trained to its end, as every toy task does it."""

from repulsive.recipes import make_task
from repulsive.training.loop import Loop
from repulsive.training.runs import RunFolder
from repulsive.training.watch import Watcher


def loop(recipe, folder, watcher=None, device="cpu"):
    return Loop(make_task(recipe), recipe, RunFolder(folder), watcher or Watcher(), device)


def train(recipe, folder, watcher=None, device="cpu"):
    made = loop(recipe, folder, watcher, device)
    try:
        made.run()
    finally:
        made.folder.close()
    return made

"""A recipe trained to its end, as every toy task does it."""

from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import make_task


def loop(recipe, folder, watcher=None, device="cpu"):
    return Loop(make_task(recipe), recipe, RunFolder(folder), watcher or Watcher(), device)


def train(recipe, folder, watcher=None, device="cpu"):
    made = loop(recipe, folder, watcher, device)
    try:
        made.run()
    finally:
        made.folder.close()
    return made

"""GLUE at toy size: tiny files, random weights, learned in seconds."""

import torch

from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import make_task, open_recipe
from tests.lab.systems import running
from tests.lab.systems.glue import glue_files

TINY = ("model.size=tiny", "optimizer.lr=1e-3", "optimizer.clip=1.0", "training.batch=16", "training.log_every=5")
ALIKE = ("rates.layer_decay=1.0",)  # one rate: random weights have to learn everywhere
CLS, SEP = glue_files.PIECES.index("[CLS]"), glue_files.PIECES.index("[SEP]")


def make_data(folder, *tasks, sizes=(160, 40, 9), **settings):
    """Prepared folders `folder/TASK`."""
    vocabulary = glue_files.write_vocabulary(folder)
    for task in tasks:
        raw = glue_files.write_task(folder / "raw", task, sizes)
        prepare("glue", raw, folder / task, glue_task=task, vocabulary=vocabulary, **settings)
    return folder


def changes(data, task, *more):
    return [f"data.folder={data / task}", *TINY, *ALIKE, *more]


def recipe(data, task, *more):
    return open_recipe(f"glue/{task}", changes(data, task, *more))


def task_and_model(data, task, *more):
    made = make_task(recipe(data, task, *more))
    torch.manual_seed(0)
    return made, made.model().eval()


def train(data, task, folder, *more, watcher=None, device="cpu"):
    return running.train(recipe(data, task, *more), folder, watcher, device)

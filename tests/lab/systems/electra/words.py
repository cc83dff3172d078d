"""A toy corpus that is learned in seconds: all words of a document start with the same syllable."""

import torch

from repulsive.lab.systems.electra.prepare import plan_pretrain
from repulsive.lab.systems.electra.toy import WORDS, write_corpus, write_vocabulary  # noqa: F401  tests take WORDS from here
from repulsive.lab.systems.registry import make_task
from tests.lab.systems import running

RECIPE = """
task = "electra"
label = "words"
data.folder = "{data}"
model = {{ layers = 2, width = 32, heads = 4, feed_forward = 64, embedding = 16, generator = 0.5, dropout = 0.1 }}
training = {{ epochs = 2, batch = 16, log_every = 5, average = 1 }}
method = {{ rule = "svgd", stepsize = 0.01, alpha = 0.1, layers = "first" }}
[optimizer]
name = "adamw"
lr = 1e-3
eps = 1e-6
weight_decay = 0.01
decay = "matrices"
bias_correction = false
schedule = "linear-throughout"
warmup = 100
clip = 1.0
"""

_TOY = running.ToyRecipe("words.toml")
toml, recipe, loop, train = _TOY.path, _TOY.open, _TOY.loop, _TOY.train


def make_data(folder, documents=200, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    corpus, vocabulary = write_corpus(folder, documents), write_vocabulary(folder)
    settings = {"length": 32, "dev": 0.1} | settings
    plan_pretrain(corpus, folder / "prepared", vocabulary=vocabulary, **settings).make(jobs=1)
    toml(folder).write_text(RECIPE.format(data=folder / "prepared"))
    return folder


def task_and_model(data, *more):
    task = make_task(recipe(data, *more))
    torch.manual_seed(0)
    return task, task.model().eval()

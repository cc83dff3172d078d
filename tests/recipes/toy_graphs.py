"""Graphs that are told in seconds: who likes or makes what."""

import json
import random

from repulsive.data.prepare_graphs import plan_graphs
from repulsive.recipes import open_recipe
from tests.recipes import running

NAMES = ["Ann", "Bob Lee", "Cem", "Dora", "Eve Ray", "Finn"]
THINGS = ["tea", "green soup", "maps", "old songs"]
TOLD = {"likes": "{a} likes {b} .", "makes": "{b} is made by {a} .", "sells": "you can buy {b} from {a} ."}
RECIPE = """
task = "graphs"
label = "toy"
data.folder = "{data}"
model = {{ width = 32, heads = 4, layers = 2, lstm_layers = 1, dropout = 0.0, titles = false }}
optimizer = {{ name = "sgd", lr = 0.2, momentum = 0.9, clip = 1.0 }}
training = {{ epochs = 3, batch = 16, log_every = 5 }}
search = {{ beam = 2, longest = 40, at_once = 8 }}
"""


def entries(count, seed):
    draw = random.Random(seed)
    for i in range(count):
        triples = [(draw.choice(NAMES), draw.choice(list(TOLD)), thing) for thing in draw.sample(THINGS, 1 + i % 2)]
        text = " ".join(TOLD[name].format(a=a, b=b) for a, name, b in triples)
        texts = [text, f"we know that {text}"][: 1 + i % 3 % 2]
        yield {"eid": f"Id{i}", "category": "Toy", "triples": [list(triple) for triple in triples], "texts": texts}


def make_data(folder):
    """Prepared graphs and a recipe."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    for seed, (part, count) in enumerate((("train", 160), ("dev", 20), ("test", 20))):
        (raw / f"{part}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries(count, seed)))
    plan_graphs(raw, folder / "prepared", tokenizer="regex", minimum=1).make()
    toml(folder).write_text(RECIPE.format(data=folder / "prepared"))
    return folder


def toml(folder):
    return folder / "toy.toml"


def recipe(folder, *more):
    return open_recipe(toml(folder), more)


def train(data, folder, *more, watcher=None):
    return running.train(recipe(data, *more), folder, watcher)

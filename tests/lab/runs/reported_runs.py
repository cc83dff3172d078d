"""Tiny runs to report on, texts with markup, and what a report and its runs hold."""

import torch

from repulsive.lab.engine.launch import Spec, train_here
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import make_task, open_recipe

TINY = {
    "model.units": 4,
    "model.hidden": 4,
    "model.mlp": 8,
    "model.embedding": 6,
    "model.gate": 5,
    "training.epochs": 2,
    "training.batch": 16,
    "training.precision": "fp32",
}
RUNS = "document.title='broken into'"
EVIL = f"<img src=x onerror={RUNS}>"
CPU = torch.device("cpu")


def train(place, name, recipe, data, heads=3, seed=0, **changes):
    words = {**TINY, "data.folder": place / data, "model.heads": heads, "seed": seed, **changes}
    spec = Spec(open_recipe(recipe, [f"{key}={value}" for key, value in words.items()]), place / name, "cpu")
    train_here(spec, make_task, quiet=True)


def write_tsv(folder, header, rows):
    folder.mkdir()
    for part in ("train", "dev", "test"):
        (folder / f"{part}.tsv").write_text("\n".join(["\t".join(header), *("\t".join(row) for row in rows * 6)]))


def panel(content, title):
    return next(panel for panel in content.panels if panel.title == title)


def results(place, name, metric):
    return [RunFolder(place / name / f"seed-{seed}").result["test"][metric] for seed in (0, 1)]

"""Toy size for `--quick`: generated datasets, and recipe changes for models that train in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from repulsive.lab.paper.datasets import Dataset
from repulsive.lab.paper.options import Options
from repulsive.lab.systems.classification import toy as classification_toy
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra import toy as electra_toy
from repulsive.lab.systems.glue import toy as glue_toy
from repulsive.lab.systems.graphs import toy as graphs_toy
from repulsive.lab.systems.translation import toy as translation_toy
from repulsive.lab.text.folders import MANIFEST

SEEDS = 2
_TRAINING = ("training.log_every=20", "training.precision=fp32")
CHANGES: dict[str, tuple[str, ...]] = {
    "classification": (
        "model.embedding=16",
        "model.units=16",
        "model.hidden=12",
        "model.heads=4",
        "model.mlp=24",
        "model.gate=12",
        "model.dropout=0.0",
        "optimizer.lr=0.01",
        "training.epochs=5",
        "training.batch=16",
        *_TRAINING,
    ),
    "translation": (
        "model.width=32",
        "model.heads=4",
        "model.depth=[1, 1]",
        "model.feed_forward=64",
        "model.dropout=0.0",
        "optimizer.lr=1e-2",
        "optimizer.warmup=20",
        "training.epochs=8",
        "training.batch=256",
        "training.average=2",
        "packed=false",
        "search.beam=2",
        "search.longest=20",
        *_TRAINING,
    ),
    "graphs": (
        "model.width=32",
        "model.heads=4",
        "model.layers=1",
        "model.lstm_layers=1",
        "model.titles=false",
        "training.epochs=2",
        "training.batch=16",
        "search.beam=2",
        "search.longest=30",
        *_TRAINING,
    ),
    "electra": (
        "model.layers=2",
        "model.width=32",
        "model.heads=4",
        "model.feed_forward=64",
        "model.embedding=16",
        "model.generator=0.5",
        "data.steps=30",
        "optimizer.warmup=10",
        "training.epochs=1",
        "training.batch=16",
        *_TRAINING,
    ),
    "glue": (
        "optimizer.lr=3e-3",
        "optimizer.clip=1.0",
        "rates.layer_decay=1.0",
        "training.epochs=2",
        "training.batch=16",
        *_TRAINING,
    ),
}
HEADS = (2, 4, 8)  # numbers of heads in Figure 3


def recipe_changes(kind: str, options: Options) -> tuple[str, ...]:
    """Return `key=value` changes that shrink a recipe of a kind to toy size; empty if the options ask for full size."""
    return CHANGES[kind] if options.toy else ()


def make(datasets: Sequence[Dataset], root: Path) -> None:
    """Generate and prepare missing datasets, deterministically."""
    for dataset in datasets:
        folder = dataset.folder(root)
        if not (folder / MANIFEST).is_file():
            _MAKERS[dataset.kind](dataset, root / "raw", folder)


def _make_classification(dataset: Dataset, raw: Path, folder: Path) -> None:
    if dataset.paper_name == "snli":
        prepare("snli", classification_toy.write_opinions(raw / "opinions"), folder, jobs=1, tokenizer="regex")
    else:  # generated reviews; those of "age" mention only one aspect
        is_age = dataset.paper_name == "age"
        prepare(
            "reviews",
            None,
            folder,
            jobs=1,
            train=600,
            dev=100,
            test=150,
            filler=0,
            aspects=(1, 1 if is_age else 2),
            seed=int(is_age),
        )


def _make_translation(dataset: Dataset, raw: Path, folder: Path) -> None:
    pairs = translation_toy.write_pairs(raw / "spelled", (400, 20, 30), longest=5)
    source, target = ("en", "de") if dataset.name == "wmt14" else ("de", "en")
    prepare("translation", pairs, folder, jobs=1, most=120, source=source, target=target)


def _make_graphs(dataset: Dataset, raw: Path, folder: Path) -> None:
    files = graphs_toy.write_graphs(raw / "told", (160, 20, 24))
    prepare("graphs", files, folder, tokenizer="regex", minimum=1)


def _make_pretraining(dataset: Dataset, raw: Path, folder: Path) -> None:
    text = electra_toy.write_corpus(_make_folder(raw / "corpus"))
    prepare("pretrain", text, folder, jobs=1, vocabulary=_vocabulary(raw), length=32, dev=0.1)


def _make_glue(dataset: Dataset, raw: Path, folder: Path) -> None:
    files = glue_toy.write_task(raw / "marked", dataset.name, (96, 40, 9))
    prepare("glue", files, folder, jobs=1, glue_task=dataset.name, vocabulary=_vocabulary(raw))


def _vocabulary(raw: Path) -> Path:
    """Write the vocabulary that pre-training and all fine-tuning tasks share."""
    return electra_toy.write_vocabulary(_make_folder(raw / "corpus"), [*glue_toy.PIECES, *glue_toy.WORDS])


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_MAKERS: dict[str, Callable[[Dataset, Path, Path], None]] = {
    "classification": _make_classification,
    "translation": _make_translation,
    "graphs": _make_graphs,
    "electra": _make_pretraining,
    "glue": _make_glue,
}

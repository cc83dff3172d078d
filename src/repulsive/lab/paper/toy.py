"""Everything at toy size: data that are generated in seconds, and models that learn them in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from repulsive.lab.paper.datasets import DataSet
from repulsive.lab.systems.classification import toy as opinions
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra import toy as corpus
from repulsive.lab.systems.glue import toy as marked
from repulsive.lab.systems.graphs import toy as told
from repulsive.lab.systems.translation import toy as spelled
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
HEADS = (2, 4, 8)  # of the figure over their number


def changes(kind: str) -> tuple[str, ...]:
    """`key=value` that make a recipe of a task one for two cores and a second."""
    return CHANGES[kind]


def make(data: Sequence[DataSet], root: Path) -> None:
    """Generate and prepare data sets that are not there yet; each is the same whenever it is made."""
    for each in data:
        folder = each.folder(root)
        if not (folder / MANIFEST).is_file():
            _MAKERS[each.kind](each, root / "raw", folder)


def _classification(data: DataSet, raw: Path, folder: Path) -> None:
    if data.paper == "snli":
        prepare("snli", opinions.write_opinions(raw / "opinions"), folder, jobs=1, tokenizer="regex")
    else:  # reviews; those of "age" speak of one aspect
        few = data.paper == "age"
        prepare(
            "reviews",
            None,
            folder,
            jobs=1,
            train=600,
            dev=100,
            test=150,
            filler=0,
            aspects=(1, 1 if few else 2),
            seed=int(few),
        )


def _translation(data: DataSet, raw: Path, folder: Path) -> None:
    pairs = spelled.write_pairs(raw / "spelled", (400, 20, 30), longest=5)
    source, target = ("en", "de") if data.name == "wmt14" else ("de", "en")
    prepare("translation", pairs, folder, jobs=1, most=120, source=source, target=target)


def _graphs(data: DataSet, raw: Path, folder: Path) -> None:
    prepare("graphs", told.write_graphs(raw / "told", (160, 20, 24)), folder, tokenizer="regex", minimum=1)


def _pretrain(data: DataSet, raw: Path, folder: Path) -> None:
    text = corpus.write_corpus(_made(raw / "corpus"))
    prepare("pretrain", text, folder, jobs=1, vocabulary=_vocabulary(raw), length=32, dev=0.1)


def _glue(data: DataSet, raw: Path, folder: Path) -> None:
    files = marked.write_task(raw / "marked", data.name, (96, 40, 9))
    prepare("glue", files, folder, jobs=1, glue_task=data.name, vocabulary=_vocabulary(raw))


def _vocabulary(raw: Path) -> Path:
    """One for the corpus and for all tasks: what is fine-tuned has the pieces it was pre-trained with."""
    return corpus.write_vocabulary(_made(raw / "corpus"), [*marked.PIECES, *marked.WORDS])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_MAKERS: dict[str, Callable[[DataSet, Path, Path], None]] = {
    "classification": _classification,
    "translation": _translation,
    "graphs": _graphs,
    "electra": _pretrain,
    "glue": _glue,
}

"""Readers of prepared folders, with wrong checksums and with right ones."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra.blocks import Blocks
from repulsive.lab.systems.graphs.prepare import plan_graphs
from repulsive.lab.systems.graphs.prepared import PreparedGraphs
from repulsive.lab.systems.lm.data import Text, numbers
from repulsive.lab.systems.lm.prepare import plan_text
from repulsive.lab.text.folders import MANIFEST
from repulsive.lab.text.prepared import Prepared
from tests.fuzz.harness import Subject
from tests.fuzz.raw_files import write_corpus, write_glue, write_pairs, write_tsv
from tests.fuzz.raw_readers import read_corpus
from tests.lab.systems.graphs import graph_files


def seal_manifests(folder: Path) -> None:
    """Update the checksums in manifests to those of the present files."""
    for path in folder.rglob(MANIFEST):
        try:
            manifest = json.loads(path.read_bytes())
            listed = manifest["files" if "files" in manifest else "sha256"]
            for name in listed:
                file = path.parent / name
                if file.is_file():
                    listed[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            path.write_text(json.dumps(manifest))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
            continue


def make_prepared(folder: Path) -> None:
    prepare("reviews", None, folder / "data", train=30, dev=8, test=8, jobs=1)


def make_glue(folder: Path) -> None:
    raw, pieces = folder.parent / "raw", folder.parent
    write_glue(raw)
    prepare("glue", raw / "raw", folder / "data", glue_task="sts", vocabulary=raw / "vocab.txt")
    assert pieces.is_dir()


def make_pairs(folder: Path) -> None:
    write_pairs(folder.parent / "raw")
    prepare("translation", folder.parent / "raw", folder / "data", tokenizer="none", most=60, jobs=1)


def make_graphs(folder: Path) -> None:
    raw = graph_files.write_webnlg(folder.parent / "raw")
    plan_graphs(raw, folder / "data", tokenizer="regex", minimum=1).make()


def make_blocks(folder: Path) -> None:
    write_corpus(_fresh(folder.parent / "raw"))
    read_corpus(folder.parent / "raw", folder / "data")


def make_text(folder: Path) -> None:
    write_corpus(_fresh(folder.parent / "raw"))
    plan_text(folder.parent / "raw" / "texts" / "a.txt", folder / "data", dev=0.2).make()


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def use_prepared(folder: Path, out: Path) -> None:
    """Load it and take every sentence, as a training would."""
    from repulsive.lab.text.pieces import Pieces

    found = Prepared.load(folder / "data")
    for part in found.parts.values():
        for side in part.sentences:
            table, _ = side.padded(torch.arange(len(part)))
            assert int(table.max()) < len(found.vocabulary)
        if part.evidence is not None:
            part.evidence_mask(torch.arange(len(part)), int(part.lengths.max()))
    if found.task == "translation":
        Pieces.of(found).encode([["eins", "zwei"]])


def use_graphs(folder: Path, out: Path) -> None:
    """Load them and write every text out again."""
    found = PreparedGraphs.load(folder / "data")
    for part in found.parts.values():
        for graph in range(len(part)):
            for row in part.texts_of(graph):
                found.text(part.targets[row], part.copies[row], part.names[graph])


def use_blocks(folder: Path, out: Path) -> None:
    found = Blocks.load(folder / "data")
    for rows in found.parts.values():
        assert rows.shape[1] == found.length + 2


def use_text(folder: Path, out: Path) -> None:
    found = Text.load(folder / "data")
    for part, tokens in found.parts.items():
        assert int(numbers(tokens).max()) < found.vocabulary and found.tokens_per_byte(part) > 0


def make_again(folder: Path) -> None:
    write_tsv(folder.parent / "raw")
    prepare("tsv", folder.parent / "raw", folder / "data", tokenizer="regex", jobs=1)


def prepare_again(folder: Path, out: Path) -> None:
    """Asked for the same again, in a copy: what is there is taken, or refused."""
    write_tsv(out.parent / "out" / "raw")
    if (folder / "data").is_dir():
        shutil.copytree(folder / "data", out / "data", symlinks=True)
    prepare("tsv", out / "raw", out / "data", tokenizer="regex", jobs=1)


def _both(name: str, make: Any, use: Any) -> list[Subject]:
    """With wrong checksums, and with right ones around wrong content."""
    return [Subject(name, make, use), Subject(f"{name} sealed", make, use, sealed=seal_manifests)]


PREPARED = [
    *_both("prepared", make_prepared, use_prepared),
    *_both("prepared glue", make_glue, use_prepared),
    *_both("prepared pairs", make_pairs, use_prepared),
    *_both("prepared graphs", make_graphs, use_graphs),
    *_both("prepared blocks", make_blocks, use_blocks),
    *_both("prepared text", make_text, use_text),
    Subject("prepared again", make_again, prepare_again, sealed=seal_manifests),
]

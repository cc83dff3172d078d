"""The prepared folder: files are read back as written, and damaged files are named."""

import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.systems.classification import generated
from repulsive.lab.systems.classification.generated import ASPECTS, generate, pack_evidence
from repulsive.lab.text import folders
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import Vocabulary
from repulsive.metrics.classification import evidence_coverage


def part(vocabulary, *sides, labels=(1, 0, 1)):
    return Part(tuple(vocabulary.encode(side) for side in sides), torch.tensor(labels))


def small(folder, words=("a", "b"), vectors=None, sides=1):
    vocabulary = Vocabulary(("<pad>", "<unk>", *words))
    first, last = words[0], words[-1]
    sentences = ([[last, first, "?"], [last], [first] * 4], [[first] * 2, [last] * 3, [first]])[:sides]
    parts = {name: part(vocabulary, *sentences) for name in ("train", "dev", "test")}
    return Prepared(folder, "toy", ("no", "yes"), vocabulary, vectors, parts, {"rows": {"train": 3}})


@pytest.mark.parametrize("count", [2, 40_000, 70_000])  # ids of 15, 16 and more bits
def test_what_is_written_is_read_back(tmp_path, count):
    words = tuple(f"w{i}" for i in range(count))
    made = small(tmp_path / "deep" / "toy", words, sides=2)
    found = made.save()
    assert (found.task, found.classes, found.vocabulary) == ("toy", ("no", "yes"), made.vocabulary)
    assert found.vectors is None and list(found.parts) == ["train", "dev", "test"]
    for name, expected in made.parts.items():
        read = found.parts[name]
        assert read.labels.tolist() == [1, 0, 1] and read.labels.dtype == torch.int64 and len(read) == 3
        for side, other in zip(read.sentences, expected.sentences, strict=True):
            assert side.values.dtype == torch.int32 and torch.equal(side.values, other.values)
            assert side.offsets.dtype == torch.int64 and torch.equal(side.offsets, other.offsets)
    assert found.parts["dev"].sentences[0][1].tolist() == [count + 1]
    assert found.manifest["rows"] == {"train": 3}


def test_lengths_of_pairs_are_those_of_the_longer(tmp_path):
    train = small(tmp_path, sides=2).parts["train"]
    assert train.lengths.tolist() == [3, 3, 4] and train.lengths.dtype == torch.int64
    assert small(tmp_path).parts["train"].lengths.tolist() == [3, 1, 4]


def test_vectors_whole_and_half(tmp_path):
    vectors = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1 / 3, -0.1], [4.0, 5.0]])
    made = small(tmp_path / "toy", vectors=vectors)
    assert torch.equal(made.save().vectors, vectors)
    half = made.save(half_vectors=True).vectors
    assert half.dtype == torch.float32 and torch.equal(half, vectors.half().float()) and not torch.equal(half, vectors)


def test_a_damaged_or_missing_file_is_named(tmp_path):
    folder = small(tmp_path / "toy", vectors=torch.zeros(4, 2)).save().folder
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "dev.safetensors",
        "manifest.json",
        "test.safetensors",
        "train.safetensors",
        "vectors.safetensors",
        "vocabulary.json",
    ]
    for path in folder.iterdir():
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 1
        flipped = [] if path.name == "manifest.json" else [damaged]  # there it may hit another file's checksum
        for content in (*flipped, whole[:-1], b""):
            path.write_bytes(content)
            with pytest.raises(DataError, match=f"{path.name}: damaged"):
                Prepared.load(folder)
        path.write_bytes(whole)
    (folder / "dev.safetensors").unlink()
    with pytest.raises(DataError, match=r"dev\.safetensors: cannot be read \(No such file"):
        Prepared.load(folder)


def test_a_missing_folder_and_another_format(tmp_path):
    with pytest.raises(DataError, match=r"run: repulsive prepare DATASET --out .*toy, with a name"):
        Prepared.load(tmp_path / "toy")
    folder = small(tmp_path / "toy").save().folder
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(DataError, match="has format 99"):
        Prepared.load(folder)


def test_saving_replaces_a_prepared_folder_and_nothing_else(tmp_path):
    small(tmp_path / "toy").save()
    assert small(tmp_path / "toy", words=("x", "y", "z")).save().vocabulary.words[2:] == ("x", "y", "z")
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work")
    with pytest.raises(DataError, match="thesis: holds something else"):
        small(other).save()
    with pytest.raises(DataError, match="expected a folder, found a file"):
        small(other / "chapter.txt").save()
    with pytest.raises(DataError, match="cannot be written"):
        small(other / "chapter.txt" / "toy").save()
    assert (other / "chapter.txt").read_text() == "years of work"


def test_a_full_disk_is_reported_without_a_file_name(tmp_path):
    """The operating system names no file when a write fails."""
    refused = pytest.raises(DataError, match=r"toy: cannot be written \(No space left on device\)$")
    with refused, folders.filling(tmp_path / "toy", {}), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


@pytest.mark.parametrize("renames", [0, 1])
def test_an_interrupted_save_leaves_the_old_folder_and_no_other(tmp_path, monkeypatch, renames):
    small(tmp_path / "toy").save()
    real, calls = os.rename, []

    def interrupted(source, target):
        calls.append(target)
        if len(calls) == renames + 1:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(folders.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "toy", words=("x", "y")).save()
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    assert Prepared.load(tmp_path / "toy").vocabulary.words[2:] == ("a", "b")


def test_what_a_killed_process_left_is_removed(tmp_path):
    for name in (".toy.123.new", ".toy.9.old", ".toy.v2.123.new", ".toy"):
        (tmp_path / name).mkdir()
    small(tmp_path / "toy").save()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".toy", ".toy.v2.123.new", "toy"]


def test_loading_needs_neither_spacy_nor_pydantic(tmp_path, monkeypatch):
    folder = small(tmp_path / "toy").save().folder
    for name in ("spacy", "pydantic", "rich", "typer"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    assert len(Prepared.load(folder).parts["train"]) == 3
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[train\]'"):
        Prepared.load(folder)


# evidence

REVIEWS = generate(40, seed=3)


def reviews_part(folder, longest=None):
    vocabulary = Vocabulary.build([review.tokens for review in REVIEWS])
    sentences = (vocabulary.encode([review.tokens for review in REVIEWS], longest),)
    one = Part(sentences, torch.tensor([review.stars - 1 for review in REVIEWS]), pack_evidence(REVIEWS, longest))
    parts = dict.fromkeys(("train", "dev", "test"), one)
    made = replace(small(folder), classes=tuple("12345"), vocabulary=vocabulary, parts=parts)
    return made.save().parts["test"]


@pytest.mark.parametrize("sentences", [False, True])
def test_evidence_is_where_the_generator_has_it(tmp_path, sentences):
    found = reviews_part(tmp_path / "reviews")
    indices = torch.tensor([7, 0, 39, 7])
    expected = generated.evidence_mask([REVIEWS[i] for i in indices], 100, sentences=sentences)
    assert torch.equal(found.evidence_mask(indices, 100, sentences=sentences), expected)
    assert expected.shape == (4, len(ASPECTS), 100) and expected.any()


def test_evidence_fits_the_metric_and_is_cut_with_the_words(tmp_path):
    found = reviews_part(tmp_path / "reviews", longest=20)
    everything = torch.arange(40)
    mask = found.evidence_mask(everything, 20)  # [B, K, T]
    assert torch.equal(mask, generated.evidence_mask(REVIEWS, 100)[..., :20])
    looks = mask[:, 1:2].double()  # one head, which looks at one aspect
    assert evidence_coverage(looks, mask) == mask[:, 1].any(-1).sum().double() / mask.any(-1).sum()
    with pytest.raises(DataError, match="no known evidence"):
        small(tmp_path).parts["train"].evidence_mask(everything[:2], 20)

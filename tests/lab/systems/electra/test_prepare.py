"""Prepare a pre-training corpus: packing against the official builder, texts and archives, the folder, errors."""

import gzip
import io
import itertools
import json
import lzma
import random
import tarfile

import numpy as np
import pytest

from repulsive.cli.app import run
from repulsive.errors import DataError
from repulsive.lab.systems.electra.blocks import Blocks, unpack
from repulsive.lab.systems.electra.packing import as_rows, full, official
from repulsive.lab.systems.electra.prepare import plan_pretrain
from repulsive.lab.text.documents import find_corpus, read_documents
from tests.lab.systems.electra import words

pytest.importorskip("tokenizers")


def documents(seed=0, count=60, longest=40):
    """Make paragraphs of numbers that are all different, so that every piece can be traced."""
    draw, number = random.Random(seed), itertools.count(100)
    return [
        [[next(number) for _ in range(draw.randint(0, longest))] for _ in range(draw.randint(1, 6))]
        for _ in range(count)
    ]


# packing


class OfficialBuilder:
    """Reimplement the ExampleBuilder of google-research/electra, on numbers instead of texts."""

    def __init__(self, max_length, draw):
        self.sentences, self.length, self.max, self.target, self.draw = [], 0, max_length, max_length, draw

    def add_line(self, ids):
        if not ids and self.length != 0:
            return self.create()
        self.sentences.append(ids)
        self.length += len(ids)
        return self.create() if self.length >= self.target else None

    def create(self):
        goal = 100000 if self.draw.random() < 0.1 else (self.target - 3) // 2
        first, second = [], []
        for sentence in self.sentences:
            if (
                len(first) == 0
                or len(first) + len(sentence) < goal
                or (len(second) == 0 and len(first) < goal and self.draw.random() < 0.5)
            ):
                first = first + sentence
            else:
                second = second + sentence
        first = first[: self.max - 2]
        second = second[: max(0, self.max - len(first) - 3)]
        self.sentences, self.length = [], 0
        self.target = self.draw.randint(5, self.max) if self.draw.random() < 0.05 else self.max
        return first, second


@pytest.mark.parametrize("length", [16, 64])
def test_official_blocks_are_those_of_the_official_builder(length):
    found = [
        [p for p in document if p] for document in documents(count=300)
    ]  # the official builder never sees empty lines
    found = [document for document in found if document]
    builder, expected = OfficialBuilder(length, random.Random(3)), []
    for document in found:
        made = [builder.add_line(paragraph) for paragraph in [*document, []]]
        expected += [block for block in made if block is not None]
    assert list(official(found, length, random.Random(3))) == expected
    sizes = [len(first) + len(second) for first, second in expected]
    assert len(expected) > 100 and min(sizes) < length - 3 and any(not second for _, second in expected)


def test_full_blocks_lose_nothing_and_have_no_padding():
    found, length = documents(count=300), 32
    blocks = list(full(found, length, random.Random(0)))
    stream = [piece for document in found for paragraph in document for piece in paragraph]
    joined = [piece for first, second in blocks for piece in first + second]
    assert joined == stream[: len(joined)] and len(stream) - len(joined) < length - 2
    ends = set(itertools.accumulate(len(p) for document in found for p in document))
    at, alone = 0, 0
    for first, second in blocks:
        assert len(first) + len(second) == (length - 3 if second else length - 2)
        if second:
            assert at + len(first) in ends  # segments end with a paragraph, the nearest to the middle
            inside = [end - at for end in ends if 0 < end - at < length - 3]
            assert abs(2 * len(first) - (length - 3)) == min(abs(2 * end - (length - 3)) for end in inside)
        alone += not second
        at += len(first) + len(second)
    assert 0.05 < alone / len(blocks) < 0.6  # a tenth at random, and blocks within long paragraphs


def test_rows_say_where_segments_end():
    marks = {"PAD": 0, "CLS": 2, "SEP": 3}
    rows = as_rows([([7, 8], [9]), ([7] * 6, []), ([65535], [])], 8, marks)
    assert rows.dtype == np.uint16 and rows.tolist() == [
        [2, 7, 8, 3, 9, 3, 0, 0, 4, 6],
        [2, 7, 7, 7, 7, 7, 7, 3, 8, 8],
        [2, 65535, 3, 0, 0, 0, 0, 0, 3, 3],
    ]
    assert as_rows([], 8, marks).shape == (0, 10)


# the folder


@pytest.mark.parametrize("packing", ["full", "official"])
def test_what_is_made(packing, tmp_path):
    words.make_data(tmp_path, 120, packing=packing)
    blocks = Blocks.load(tmp_path / "prepared")
    told, pieces = blocks.manifest, blocks.pieces.pieces
    assert sum(told["documents"].values()) == 120 and blocks.padded == (packing == "official")
    seen = []
    for name, part in blocks.parts.items():
        tokens, first, ends = unpack(part, 32)
        assert len(part) == told["rows"][name] > 0
        for row, middle, end in zip(tokens.tolist(), first.tolist(), ends.tolist(), strict=True):
            texts = [pieces[i] for i in row]
            assert texts[0] == "[CLS]" and texts[middle - 1] == texts[end - 1] == "[SEP]"
            assert set(texts[end:]) <= {"[PAD]"} and texts[:end].count("[SEP]") == 1 + (end > middle)
            seen += [text for text in texts[:end] if not text.startswith("[")]
        assert packing == "official" or int(ends.min()) == 32
    assert len(seen) == sum(told["kept"].values())
    assert set(seen) == {*words.WORDS, "."}  # lower-cased
    if packing == "full":
        whole = (tmp_path / "corpus.txt").read_text().lower().replace(".", " .").split()
        assert len(whole) == sum(told["pieces"].values()) and len(whole) - len(seen) < 3 * 30


def test_the_number_of_processes_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("repulsive.lab.systems.electra.prepare._FEW", 0)
    monkeypatch.setattr("repulsive.lab.systems.electra.prepare._CHUNK", 2_000)
    corpus, vocabulary = words.write_corpus(tmp_path, 150), words.write_vocabulary(tmp_path)
    calls = []
    plans = [plan_pretrain(corpus, tmp_path / str(jobs), vocabulary=vocabulary, length=32, dev=0.1) for jobs in (1, 2)]
    one, two = (p.make(jobs, lambda *x: calls.append(x)) for p, jobs in zip(plans, (1, 2), strict=True))
    assert one.manifest == two.manifest and calls[-1] == ("documents", 150, 0)
    other = plan_pretrain(corpus, tmp_path / "seed", vocabulary=vocabulary, length=32, dev=0.1, seed=1).make(1)
    assert other.manifest["files"]["train.npy"] != one.manifest["files"]["train.npy"]


def test_the_verb(tmp_path, capsys):
    corpus, vocabulary = words.write_corpus(tmp_path), words.write_vocabulary(tmp_path)
    command = ["prepare", "pretrain", "--vocabulary", str(vocabulary), "--out", str(tmp_path / "out"), "--jobs", "1"]
    command += ["--length", "32", "--dev", "0.1"]
    assert run([*command, "--data", str(tmp_path)]) == 0  # the vocabulary in the same folder is left out
    assert "0.0% padding" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"].keys() == {"corpus.txt", "vocab.txt"}
    assert run([*command, "--data", str(corpus)]) == 0
    assert "is prepared already" in capsys.readouterr().out
    for more, message in (
        (["--packing", "official"], "was prepared with packing 'full', not 'official'"),
        (["--packing", "none"], "choose one of official, full"),
        (["--length", "4"], "from 8 to 512"),
        (["--dev", "0.7"], "between 0 and 0.5"),
        (["--tokenizer", "spacy"], "dataset 'pretrain' has no option '--tokenizer'"),
        (["--data", str(tmp_path / "none")], "no such file or folder"),
        (["--vocabulary", str(corpus)], "corpus.txt: not a WordPiece vocabulary: it lacks [PAD]"),
        (["--vocabulary", str(tmp_path / "none.txt")], "none.txt"),
    ):
        assert run([*command, "--data", str(corpus), *more]) == 2, more
        output = capsys.readouterr().err
        assert message in output and output.count("\n") == 1, output
    assert run(["prepare", "pretrain", "--data", str(corpus)]) == 2
    assert "--vocabulary" in capsys.readouterr().err
    assert run(["prepare", "tsv", "--data", str(tmp_path), "--length", "9"]) == 2
    assert "no option '--length'" in capsys.readouterr().err


def test_a_vocabulary_without_masks(tmp_path):
    vocabulary = words.write_vocabulary(tmp_path)
    vocabulary.write_text(vocabulary.read_text().replace("[MASK]", "mask"))
    with pytest.raises(DataError, match=r"vocab.txt: the vocabulary lacks \[MASK\]"):
        plan_pretrain(words.write_corpus(tmp_path), tmp_path / "out", vocabulary=vocabulary)


def test_a_part_without_documents(tmp_path):
    corpus, vocabulary = words.write_corpus(tmp_path, 3), words.write_vocabulary(tmp_path)
    with pytest.raises(DataError, match=r"corpus.txt: too few texts for a (dev|test) part; raise --dev"):
        plan_pretrain(corpus, tmp_path / "out", vocabulary=vocabulary, dev=1e-6).make(1)
    assert not (tmp_path / "out").exists()


def test_texts_too_short_for_a_block(tmp_path):
    corpus, vocabulary = words.write_corpus(tmp_path, 3), words.write_vocabulary(tmp_path)
    with pytest.raises(DataError, match=rf"{corpus}.*: not one block of 512 pieces; give more text or a smaller"):
        plan_pretrain(corpus, tmp_path / "out", vocabulary=vocabulary, length=512, dev=1e-6).make(1)


def test_a_damaged_folder(tmp_path):
    data = words.make_data(tmp_path) / "prepared"
    rows = np.load(data / "train.npy", mmap_mode="r+")
    rows[0, 0] += 1
    rows.flush()
    with pytest.raises(DataError, match=r"train.npy: damaged"):
        Blocks.load(data)
    (data / "train.npy").unlink()
    with pytest.raises(DataError, match=r"train.npy: cannot be read"):
        Blocks.load(data)


# files


def packed(*texts, name="page"):
    """Make a tar file of texts."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i, text in enumerate(texts):
            info = tarfile.TarInfo(f"{name}-{i}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return file.getvalue()


def open_web_text(path, *archives):
    """Make a tar file of xz-compressed tar files, as OpenWebText is published."""
    with tarfile.open(path, "w:xz") as outer:
        outer.addfile(tarfile.TarInfo("openwebtext/README"))
        for i, inner in enumerate(archives):
            data = lzma.compress(inner)
            info = tarfile.TarInfo(f"openwebtext/urlsf_subset{i:02}_data.xz")
            info.size = len(data)
            outer.addfile(info, io.BytesIO(data))
    return path


def test_texts_plain_and_compressed(tmp_path):
    text = b"One.\r\n Two. \n\n\n\nThree.\n \nFour"
    for name, data in (("a.txt", text), ("b.txt.xz", lzma.compress(text)), ("c.txt.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        assert list(read_documents(tmp_path / name)) == [["One.", "Two."], ["Three."], ["Four"]]
    assert [path.name for path in find_corpus(tmp_path)] == ["a.txt", "b.txt.xz", "c.txt.gz"]


def test_archives_are_read_without_unpacking(tmp_path):
    expected = [["One.", "Two."], ["Three."], ["Four."]]
    pages = packed(b"One.\n\nTwo.\n", b"Three."), packed(b"Four.", b"\n \n")
    path = open_web_text(tmp_path / "openwebtext.tar.xz", *pages)
    assert list(read_documents(path)) == expected
    (tmp_path / "urlsf_subset00_data.xz").write_bytes(lzma.compress(pages[0]))  # one of the inner archives
    assert list(read_documents(tmp_path / "urlsf_subset00_data.xz")) == expected[:2]
    (tmp_path / "plain.tar").write_bytes(packed(b"\xef\xbb\xbfFour."))  # a byte order mark is not text
    assert list(read_documents(tmp_path / "plain.tar")) == expected[2:]
    assert {p.name for p in tmp_path.iterdir()} == {"openwebtext.tar.xz", "urlsf_subset00_data.xz", "plain.tar"}


def test_files_that_are_not_utf8_are_counted(tmp_path):
    path = open_web_text(tmp_path / "a.tar.xz", packed(b"One.", b"\xff\xfe", b"Two."))
    with pytest.warns(UserWarning, match=r"page-1.txt: byte 0 \(0xff\) is not UTF-8"):
        assert list(read_documents(path)) == [["One."], ["Two."]]
    with pytest.raises(DataError, match="more than 0 bad lines"):
        list(read_documents(path, limit=0))


@pytest.mark.parametrize("what", ["outer", "inner", "text"])
def test_damaged_files_are_named(what, tmp_path):
    text = random.Random(0).randbytes(4000).hex().encode()
    path = tmp_path / "damaged.xz"
    if what == "inner":
        data = lzma.compress(packed(text, text))
        with tarfile.open(path, "w:xz") as outer:
            info = tarfile.TarInfo("inner_data.xz")
            info.size = len(data) // 2
            outer.addfile(info, io.BytesIO(data))
    else:
        whole = lzma.compress(packed(text, text) if what == "outer" else text)
        path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"damaged.xz: truncated or damaged"):
        list(read_documents(path))

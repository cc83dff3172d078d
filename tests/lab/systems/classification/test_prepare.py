"""Prepare classification datasets from small raw files, and the errors for invalid options and files."""

import doctest
import gzip
import hashlib
import json
import lzma
import sys

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.systems.classification import sources
from repulsive.lab.systems.classification.generated import NEGATIONS, OPINIONS
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.text.tokens import UNK

PARTS = ("train", "dev", "test")


def write(path, *lines):
    text = ("\n".join(lines) + "\n").encode()
    packed = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return path


def words(prepared, part, side=0):
    """Decode the sentences of a part."""
    names = prepared.vocabulary.words
    sentences = prepared.parts[part].sentences[side]
    return [[names[i] for i in sentences[n].tolist()] for n in range(len(sentences))]


@pytest.fixture
def toy(tmp_path):
    """Write raw files; in the training set, a occurs three times, b and x twice, c once."""
    write(tmp_path / "raw" / "train.tsv", "text\tlabel", "A b a a b\tno", "x X\tyes", "c\tno")
    write(tmp_path / "raw" / "dev.tsv.xz", "text\tlabel", "a d d d d\tyes", "b b\tno")
    write(tmp_path / "raw" / "test.tsv.gz", "text\tlabel", "b\tno")
    return tmp_path


def prepared_toy(folder, **settings):
    return prepare("tsv", folder / "raw", folder / "out", **{"tokenizer": "regex", **settings})


# results


def test_numbers_vocabulary_and_counts(toy):
    found = prepared_toy(toy, longest=4)
    assert found.vocabulary.words == (
        "<pad>",
        "<unk>",
        "a",
        "x",
    )  # one of two b is cut off, so that b occurs too rarely
    assert words(found, "train") == [["a", "<unk>", "a", "a"], ["x", "x"], ["<unk>"]]
    assert words(found, "dev") == [["a", *["<unk>"] * 3], ["<unk>"] * 2]
    assert found.classes == ("no", "yes") and found.task == "tsv"
    assert found.parts["train"].labels.tolist() == [0, 1, 0] and found.parts["dev"].labels.tolist() == [1, 0]


def test_the_manifest_says_how_it_was_made(toy):
    write(toy / "raw" / "train.tsv", "text\tlabel", "a b a a b\tno", "x x\tyes", "c\tno", "broken line")
    with pytest.warns(UserWarning, match="1 bad line skipped"):
        told = prepared_toy(toy, longest=4).manifest
    assert told["rows"] == {"train": 3, "dev": 2, "test": 1} and told["skipped"] == {"train": 1, "dev": 0, "test": 0}
    assert told["cut"] == {"train": 1, "dev": 1, "test": 0}
    assert told["unknown"] == {"train": 2 / 7, "dev": 1.0 - 1 / 6, "test": 1.0} and told["coverage"] is None
    assert told["settings"]["longest"] == 4 and told["settings"]["tokenizer"] == "regex"
    names = ("train.tsv", "dev.tsv.xz", "test.tsv.gz")
    assert told["sources"] == {name: hashlib.sha256((toy / "raw" / name).read_bytes()).hexdigest() for name in names}


def test_vectors_and_their_coverage(toy):
    vectors = write(toy / "glove.txt", "a 1 2", "b 3 4", "zebra 5 6")
    found = prepared_toy(toy, vectors=vectors, size=2, half_vectors=True)
    assert found.vocabulary.words[2:] == ("a", "b", "x")
    assert found.vectors[2:4].tolist() == [[1, 2], [3, 4]] and found.vectors[0].tolist() == [0, 0]
    assert found.manifest["coverage"] == {"types": 2 / 3, "words": 5 / 8}
    assert found.manifest["sources"]["glove.txt"] == hashlib.sha256(vectors.read_bytes()).hexdigest()
    with pytest.raises(DataError, match="2 numbers after the word, expected 3"):
        prepared_toy(toy, vectors=vectors, size=3, force=True)


def test_columns_by_number_case_and_most(toy):
    found = prepared_toy(toy, label=1, text=0, header=True, lowercase=False, minimum=1, most=4)
    assert found.vocabulary.words == ("<pad>", "<unk>", "a", "b")
    assert words(found, "train")[0] == ["<unk>", "b", "a", "a", "b"]


def test_a_second_time_nothing_is_done_unless_something_changed(toy):
    prepared_toy(toy)
    before = (toy / "out" / "manifest.json").stat()
    assert prepared_toy(toy).manifest["rows"] == {"train": 3, "dev": 2, "test": 1}
    assert (toy / "out" / "manifest.json").stat().st_ino == before.st_ino
    with pytest.raises(DataError, match=r"prepared with minimum 2, not 1\. Choose another --out, or .*--force"):
        prepared_toy(toy, minimum=1)
    assert len(prepared_toy(toy, minimum=1, force=True).vocabulary) == 6
    write(toy / "raw" / "test.tsv.gz", "text\tlabel", "a\tno")
    with pytest.raises(DataError, match=r"was prepared with another test\.tsv\.gz\."):
        prepared_toy(toy, minimum=1)
    with pytest.raises(DataError, match="was prepared with task 'tsv', not 'reviews'"):
        prepare("reviews", None, toy / "out", train=5, dev=1, test=1)


# datasets


def test_yelp_from_tsv(tmp_path):
    for part, count in zip(PARTS, (6, 3, 2), strict=True):
        write(tmp_path / f"{part}.tsv.xz", "stars\ttext", *(f"{i % 5 + 1}\tgood food {i % 2}" for i in range(count)))
    found = prepare("yelp", tmp_path, tmp_path / "out", tokenizer="regex")
    assert found.classes == ("1", "2", "3", "4", "5") and found.parts["train"].labels.tolist() == [0, 1, 2, 3, 4, 0]
    assert words(found, "test") == [["good", "food", "0"], ["good", "food", "1"]]
    assert found.manifest["settings"]["longest"] == 200


def test_yelp_from_the_official_file(tmp_path):
    reviews = [json.dumps({"stars": i % 5 + 1, "text": f"word{i} \ud800"}) for i in range(30)]  # a lone surrogate
    path = write(tmp_path / "yelp_academic_dataset_review.json.gz", *reviews)
    asked = {"tokenizer": "regex", "minimum": 1, "train": 10, "dev": 4, "test": 5}
    found = prepare("yelp", tmp_path, tmp_path / "out", **asked)
    assert found.manifest["rows"] == {"train": 10, "dev": 4, "test": 5}
    for (word, *_), label in zip(words(found, "train"), found.parts["train"].labels.tolist(), strict=True):
        assert int(word[4:]) % 5 == label
    assert found.manifest["unknown"]["dev"] == found.manifest["unknown"]["test"] == 0.5  # no text is in two parts
    same = prepare("yelp", path, tmp_path / "same", **asked)
    other = prepare("yelp", path, tmp_path / "other", seed=1, **asked)
    assert same.vocabulary == found.vocabulary != other.vocabulary
    with pytest.raises(DataError, match=r"has 30 reviews, expected 500,000 \+ 4 \+ 5; choose smaller sizes"):
        prepare("yelp", tmp_path, tmp_path / "new", tokenizer="regex", dev=4, test=5)


@pytest.mark.parametrize("form", ["tsv", "xml"])
def test_age_keeps_authors_apart(tmp_path, form):
    for part in ("train", "test"):
        authors = [(f"{part}{group[:2]}{i}", group) for group in ("18-24", "50-XX") for i in range(10)]
        if form == "tsv":
            rows = [f"{group}\t{author} writes\tF\t{author}" for author, group in authors for _ in range(3)]
            write(tmp_path / f"{part}.tsv", "age_group\ttext\tgender\tauthor_id", *rows)
        else:
            write(tmp_path / part / "truth.txt", *(f"{author}:::F:::{group}" for author, group in authors))
            for author, _ in authors:
                document = f"<document>{author} writes</document>"
                write(tmp_path / part / f"{author}.xml", f"<author><documents>{document * 3}</documents></author>")
    found = prepare("age", tmp_path, tmp_path / "out", tokenizer="regex", dev=0.2)
    assert found.manifest["rows"] == {"train": 48, "dev": 12, "test": 60} and found.classes == ("18-24", "50-XX")
    assert found.manifest["unknown"] == {"train": 0, "dev": 0.5, "test": 0.5}  # no author of dev is in train
    assert found.parts["dev"].labels.bincount().tolist() == [6, 6]
    assert len(found.manifest["sources"]) == (2 if form == "tsv" else 42)


def test_snli_in_both_forms_and_tokenised_in_part(tmp_path):
    keys = ("gold_label", "sentence1", "sentence2")
    plain = [("neutral", 'A man isn\'t "here", is he?', "He's by the T-shirt stand."), ("-", "No.", "Yes.")]
    split = [("neutral", "A man is n't `` here '' , is he ?", "He 's by the T-shirt stand .")]
    plain.append(("contradiction", "No.", "Yes."))  # a second class, which training needs
    split.append(("contradiction", "No .", "Yes ."))
    for part in PARTS:
        objects = [json.dumps(dict(zip(keys, row, strict=True))) for row in plain]
        write(tmp_path / "json" / f"snli_1.0_{part}.jsonl", *objects)
        rows = split if part == "dev" else plain
        write(tmp_path / "tsv" / f"{part}.tsv", "\t".join(keys), *("\t".join(row) for row in rows))
    pytest.importorskip("spacy")
    for form in ("json", "tsv"):
        found = prepare("snli", tmp_path / form, tmp_path / f"out-{form}", minimum=1)
        assert found.classes == ("entailment", "neutral", "contradiction") and len(found.parts["dev"].sentences) == 2
        for side in (0, 1):
            assert words(found, "dev", side) == words(found, "train", side)
        assert words(found, "dev")[0] == ["a", "man", "is", "n't", '"', "here", '"', ",", "is", "he", "?"]
        assert found.manifest["unlabelled"]["train"] == 1 and found.parts["train"].labels.tolist() == [1, 2]
        assert found.parts["dev"].lengths.tolist() == [11, 2]


def test_generated_reviews_keep_their_evidence(tmp_path):
    sizes = {"train": 30, "dev": 5, "test": 6}
    found = prepare("reviews", None, tmp_path / "out", aspects=(2, 4), filler=0, **sizes)
    assert found.manifest["rows"] == sizes and found.manifest["settings"]["tokenizer"] is None
    part = found.parts["train"]
    mask = part.evidence_mask(torch.arange(30), int(part.lengths.max()))  # [B, K, T]
    table, _ = part.sentences[0].padded(torch.arange(30))
    opinions = {word for scores in OPINIONS.values() for some in scores.values() for word in some}
    seen = {found.vocabulary.words[i] for i in table[mask.any(1)].tolist() if i != UNK}
    assert seen and seen <= opinions | {*NEGATIONS}
    assert set(mask.any(-1).sum(1).tolist()) == {2, 3, 4}
    more = prepare("reviews", None, tmp_path / "more", aspects=(2, 4), filler=0, **sizes | {"train": 60})
    assert more.manifest["sources"]["generated test"] == found.manifest["sources"]["generated test"]
    assert more.manifest["sources"]["generated train"] != found.manifest["sources"]["generated train"]


# errors


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("yepl", {}, "dataset 'yepl' is unknown; did you mean 'yelp'"),
        ("sorting", {}, "dataset 'sorting' is unknown; datasets: yelp, age"),
        ("tsv", {"dev": 3}, "dataset 'tsv' has no option 'dev'; .*it has label, text, header"),
        ("tsv", {"labell": 3}, "dataset 'tsv' has no option 'labell'; did you mean 'label'\\? It has label"),
        ("tsv", {"label": "stars"}, r"train\.tsv: no column 'stars'; the header has 'text', 'label'"),
        ("snli", {}, "no snli_1.0_train.jsonl, no|no column 'gold_label'"),
        ("yelp", {"train": 3}, "no yelp_academic_dataset_review.json"),
        ("age", {"dev": 2}, "dev=2: expected the share"),
        ("age", {}, r"raw/train\.tsv"),
        ("reviews", {}, "'reviews' is generated and reads no data"),
        ("tsv", {"tokenizer": "nltk"}, "'nltk' is unknown"),
        ("tsv", {"minimum": 0}, "minimum=0: expected at least 1"),
        ("tsv", {"longest": 0}, "longest=0: expected at least 1"),
        ("tsv", {"size": 50}, "give a file with --vectors"),
        ("tsv", {"vectors": "none.txt"}, r"none\.txt: cannot be read \(No such file"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(toy, task, settings, message):
    with pytest.raises(DataError, match=message):
        prepare(task, toy / "raw", toy / "out", **{"tokenizer": "regex", "limit": 0, **settings})
    assert [path.name for path in toy.iterdir()] == ["raw"]


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(DataError, match="needs a folder with its files: give --data, or set REPULSIVE_DATA"):
        prepare("yelp", None, tmp_path / "out")
    with pytest.raises(DataError, match="gone: no such folder; it should hold the files of dataset 'yelp'"):
        prepare("yelp", tmp_path / "gone", tmp_path / "out")
    write(tmp_path / "train.tsv", "5\tgood")
    with pytest.raises(DataError, match=r"no dev\.tsv, no yelp_academic_dataset_review\.json; files may be"):
        prepare("yelp", tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="every part needs a review"):
        prepare("reviews", None, tmp_path / "out", dev=0)
    with pytest.raises(DataError, match="is tokenised already; leave out --tokenizer regex"):
        prepare("reviews", None, tmp_path / "out", tokenizer="regex", train=1)


def test_without_spacy_the_error_says_so_before_anything_is_read(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    write(toy / "raw" / "train.tsv", "damaged")
    with pytest.raises(DataError, match=r"pip install -e '\.\[classification\]'"):
        prepare("tsv", toy / "raw", toy / "out")


def test_examples_in_docstrings():
    assert doctest.testmod(sources).attempted > 0 == doctest.testmod(sources).failed

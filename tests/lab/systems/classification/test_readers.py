"""Readers on small files, whole and damaged."""

import json
import lzma

import pytest

from repulsive.errors import DataError
from repulsive.lab.systems.classification.age import age_group, read_age, split_authors
from repulsive.lab.systems.classification.reviews import read_reviews, split
from repulsive.lab.systems.classification.snli import read_snli
from repulsive.lab.text.tsv import read_tsv


def write(path, *lines):
    text = "\n".join(lines) + "\n"
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


# any TSV


@pytest.mark.parametrize("columns", [{"label": "kind", "text": "words"}, {"label": 2, "text": 0, "header": True}])
def test_tsv_by_name_and_by_index(tmp_path, columns):
    path = write(tmp_path / "a.tsv.xz", "words\tid\tkind", 'one "two\t1\tB', "three\t2\tA", "", "four\t3\tB")
    found = read_tsv(path, **columns)
    assert found.texts == ['one "two', "three", "four"]
    assert (found.classes, found.labels, found.skipped) == (("A", "B"), [1, 0, 1], 0)
    assert found.counts() == {"A": 1, "B": 2}
    assert found.select([2, 0]).texts == ["four", 'one "two'] and found.select([2, 1]).labels == [1, 0]


def test_tsv_without_header(tmp_path):
    assert read_tsv(write(tmp_path / "a.tsv", "x\tone", "y\ttwo")).texts == ["one", "two"]


def test_tsv_with_bad_lines(tmp_path):
    path = write(tmp_path / "a.tsv", "l\tt", "x\tone", "y", "x\tone\ttwo", "x\t ", "z\tfive", "y\tsix")
    with pytest.warns(UserWarning, match="4 bad lines skipped: line 3: has 1 columns"):
        found = read_tsv(path, "l", "t", classes=("y", "x"))
    assert (found.texts, found.labels, found.skipped) == (["one", "six"], [1, 0], 4)
    with pytest.raises(DataError, match=r"more than 3 bad lines; line 3"):
        read_tsv(path, "l", "t", classes=("y", "x"), limit=3)


@pytest.mark.parametrize(
    ("lines", "columns", "message"),
    [
        (("l\tt", "x\tone"), {"label": "stars", "text": "t"}, "no column 'stars'; the header has 'l', 't'"),
        (("l\tt", "x\tone"), {"label": 0, "text": 2}, "no column 2; the first line has columns 0 to 1"),
        (("x\tone",), {"label": "l", "text": 1, "header": False}, "is given by name"),
        (("l\tt",), {"label": "l", "text": "t"}, "no usable line"),
    ],
)
def test_tsv_errors(tmp_path, lines, columns, message):
    with pytest.raises(DataError, match=rf"a\.tsv: .*{message}"):
        read_tsv(write(tmp_path / "a.tsv", *lines), **columns)


def test_an_empty_file(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"")
    for read in (read_tsv, read_reviews, read_snli, read_age):
        with pytest.raises(DataError, match=r"a\.tsv: empty file"):
            read(path)


# reviews


def review(stars, text, **more):
    return json.dumps({"review_id": "a", "stars": stars, "text": text, **more})


def test_reviews_in_json_and_in_tsv_are_the_same(tmp_path):
    as_json = read_reviews(write(tmp_path / "a.json", review(4.0, "good\tone"), review(1, "bad"), review("5", "best")))
    with_header = write(tmp_path / "a.tsv.xz", "stars\ttext\tid", "4\tgood one\t1", "1.0\tbad\t2", "5\tbest\t3")
    without = write(tmp_path / "b.tsv", "4\tgood one", "1\tbad", "5\tbest")
    for found in (as_json, read_reviews(with_header), read_reviews(without)):
        assert [text.replace("\t", " ") for text in found.texts] == ["good one", "bad", "best"]
        assert found.labels == [3, 0, 4] and found.classes == ("1", "2", "3", "4", "5")
    assert read_reviews(with_header, most=2).labels == [3, 0]


def test_a_random_sample_is_uniform_and_in_order(tmp_path):
    path = write(tmp_path / "a.tsv", *(f"{i % 5 + 1}\t{i}" for i in range(20)))
    counts = [0] * 20
    for seed in range(400):
        found = [int(text) for text in read_reviews(path, most=5, seed=seed).texts]
        assert found == sorted(set(found)) and len(found) == 5
        for i in found:
            counts[i] += 1
    assert all(70 <= count <= 130 for count in counts)  # 100 each, with a deviation of 8.7
    assert len(read_reviews(path, most=50, seed=0)) == 20


def test_reviews_with_bad_lines(tmp_path):
    lines = [review(4, "good"), review(4, "cut off")[:-5], '{"text": "no stars"}', review(6, "too many")]
    lines += [review(2.5, "half"), review(3, ""), review(None, "none"), review(3, "fine")]
    path = write(tmp_path / "a.json", *lines)
    with pytest.warns(UserWarning, match="6 bad lines skipped: line 2: not JSON"):
        found = read_reviews(path)
    assert (found.texts, found.labels, found.skipped) == (["good", "fine"], [3, 2], 6)
    with pytest.raises(DataError, match="more than 1 bad lines"):
        read_reviews(path, limit=1)


@pytest.mark.parametrize(
    ("line", "message"), [("just words", "expected JSON lines, or a TSV"), ("a\ttext", "expected one of the columns")]
)
def test_files_that_hold_no_reviews(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read_reviews(write(tmp_path / "a.txt", line, line))


def test_random_parts_are_disjoint_and_whole(tmp_path):
    examples = read_reviews(write(tmp_path / "a.tsv", *(f"{i % 5 + 1}\ttext {i}" for i in range(50))))
    dev, test, train = split(examples, (5, 10), seed=3)
    assert (len(dev), len(test), len(train)) == (5, 10, 35)
    assert sorted(dev.texts + test.texts + train.texts) == sorted(examples.texts)
    assert [int(text.split()[1]) % 5 for text in train.texts] == train.labels
    assert split(examples, (5, 10), seed=3)[0].texts == dev.texts != split(examples, (5, 10), seed=4)[0].texts
    with pytest.raises(DataError, match="50 examples"):
        split(examples, (25, 25))


# SNLI


def test_snli_in_json_and_in_tsv(tmp_path):
    rows = [("neutral", "A b.", "C."), ("-", "D.", "E."), ("entailment", "F.", "G."), ("contradiction", "H", "I")]
    keys = ("gold_label", "sentence1", "sentence2")
    as_json = write(
        tmp_path / "a.jsonl", *(json.dumps(dict(zip(keys, row, strict=True)) | {"pairID": 1}) for row in rows)
    )
    as_tsv = write(
        tmp_path / "a.txt",
        "gold_label\tsentence1_parse\tsentence1\tsentence2\tpairID",
        *(f"{row[0]}\t(x)\t{row[1]}\t{row[2]}\t1" for row in rows),
    )
    for path in (as_json, as_tsv):
        found = read_snli(path)
        assert found.premises == ["A b.", "F.", "H"] and found.hypotheses == ["C.", "G.", "I"]
        assert (found.labels, found.unlabelled, found.skipped, len(found)) == ([1, 0, 2], 1, 0, 3)


def test_snli_with_bad_lines(tmp_path):
    header = "gold_label\tsentence1\tsentence2"
    path = write(tmp_path / "a.tsv", header, "neutral\tA\tB", "maybe\tA\tB", "neutral\tA", "neutral\t\tB")
    with pytest.warns(UserWarning, match="3 bad lines skipped"):
        assert read_snli(path).skipped == 3
    with pytest.raises(DataError, match="invalid label 'maybe', expected one of"):
        read_snli(path, limit=0)
    with pytest.raises(DataError, match="no column 'sentence2'"):
        read_snli(write(tmp_path / "b.tsv", "gold_label\tsentence1", "neutral\tA"))
    with pytest.raises(DataError, match="no usable line"):
        read_snli(write(tmp_path / "c.tsv", header, "-\tA\tB"))
    whole = json.dumps({"gold_label": "neutral", "sentence1": "A", "sentence2": "B"})
    with pytest.warns(UserWarning, match="line 2: lacks one of"):
        assert read_snli(write(tmp_path / "d.jsonl", whole, '{"gold_label": "neutral"}')).skipped == 1


# age groups


def test_age_from_tsv(tmp_path):
    lines = ["18-24\thello\tF\ta", "50-xx\tgood day\tM\tb", "18-24\thi\tF\ta", "young\they\tF\tc"]
    with pytest.warns(UserWarning, match="author c, line 5: 'young', expected an age group"):
        found = read_age(write(tmp_path / "a.tsv", "age_group\ttext\tgender\tauthor_id", *lines))
    assert found.texts == ["hello", "good day", "hi"] and found.classes == ("18-24", "50-XX")
    assert (found.labels, found.genders, found.authors) == ([0, 1, 0], ["F", "M", "F"], ["a", "b", "a"])
    test = read_age(write(tmp_path / "b.tsv", *lines[1:2]), classes=found.classes)
    assert test.labels == [1]
    with pytest.raises(DataError, match="'50-xx', expected one of"):
        read_age(write(tmp_path / "b.tsv", *lines[1:2]), classes=("18-24",), limit=0)


def test_age_from_a_pan_folder(tmp_path):
    document = "<author lang='en'><documents>{}</documents></author>"
    texts = (
        "<document id='1'><![CDATA[one <b>\n two]]></document><document id='2'> </document><document>three</document>"
    )
    write(tmp_path / "x1.xml", document.format(texts))
    write(tmp_path / "x2.xml", document.format("<document>four</document>"))
    write(tmp_path / "x3.xml", document.format("<document>five")[:-12])
    write(
        tmp_path / "truth.txt",
        "x1:::MALE:::25-34:::0.1",
        "x2:::FEMALE:::65-plus",
        "x3:::MALE:::25-34",
        "x4:::MALE:::25-34",
        "x5",
    )
    with pytest.warns(UserWarning, match=r"x3\.xml: not XML .*x4\.xml: no such file; truth\.txt, line 5"):
        found = read_age(tmp_path)
    assert found.texts == ["one <b> two", "three", "four"] and found.classes == ("25-34", "65-XX")
    assert found.authors == ["x1", "x1", "x2"] and found.genders == ["MALE", "MALE", "FEMALE"]
    assert found.skipped == 3
    (tmp_path / "truth.txt").unlink()
    with pytest.raises(DataError, match=r"no truth\.txt"):
        read_age(tmp_path)


def test_age_groups():
    assert [age_group(text) for text in ("18-24", " 50-xx", "65-plus", "18 24", "118-24", "")] == [
        "18-24",
        "50-XX",
        "65-XX",
        None,
        None,
        None,
    ]


def test_development_authors_are_others_and_every_class_has_some(tmp_path):
    lines = [f"{group}\ttext {i}\tF\t{group}/{i % 12}" for group in ("18-24", "25-34", "50-XX") for i in range(60)]
    profiles = read_age(write(tmp_path / "a.tsv", *lines))
    train, dev = split_authors(profiles, 0.2, seed=1)
    assert set(train.authors) & set(dev.authors) == set()
    assert len(train) + len(dev) == 180 and len(dev.authors) == len(dev.texts) == len(dev.genders)
    assert dev.counts() == dict.fromkeys(profiles.classes, 15)  # 12 of 60 wanted, and authors have 5 each
    assert all(author.startswith(dev.classes[label]) for author, label in zip(dev.authors, dev.labels, strict=True))
    assert split_authors(profiles, 0.2, seed=1)[1].texts == dev.texts != split_authors(profiles, 0.2, seed=2)[1].texts
    assert set(split_authors(profiles, 0.99)[0].labels) == {0, 1, 2}  # an author of each class stays
    with pytest.raises(DataError, match="50-XX has only one author"):
        split_authors(profiles.select([*range(120), 120]))

"""Prepare parallel files: file names, cleaning, marks, errors, and the same vocabulary in every process."""

import gzip
import hashlib
import json
import lzma
import subprocess
import sys

import pytest

from repulsive.cli.app import run
from repulsive.errors import DataError
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.translation.parallel import clean
from repulsive.lab.text.pieces import BOS, EOS, MARKS, Pieces, learn
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import UNK, tokenizer
from tests.lab.systems.translation.parallel_files import write_pairs

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")


@pytest.fixture
def raw(tmp_path):
    return write_pairs(tmp_path / "raw")


def made(raw, **settings):
    return prepare("translation", raw, raw.parent / "out", jobs=1, **{"most": 80, **settings})


def test_words_become_pieces_and_words_again(raw):
    found = made(raw)
    pieces = Pieces.of(found)
    assert found.vocabulary.words[:4] == MARKS and len(found.vocabulary) == 80
    assert [len(found.parts[part]) for part in ("train", "dev", "test")] == [200, 20, 20]
    lines = (raw / "test.en").read_text().splitlines()
    for i, line in enumerate(lines):
        ids = found.parts["test"].sentences[1][i].tolist()
        assert ids[-1] == EOS and BOS not in ids and EOS not in ids[:-1]
        assert pieces.words(ids) == line.lower().replace(".", " .")
        assert pieces.text(pieces.words(ids)) == line.lower()
        assert pieces.words([*ids, *ids]) == pieces.words(ids)  # nothing after the end
    references = json.loads(found.extra["references.json"])
    assert references["test"]["text"] == lines and set(references) == {"dev", "test"}
    assert references["test"]["words"] == [line.lower().replace(".", " .") for line in lines]


def test_case_and_tokens_are_kept_where_asked(raw):
    found = made(raw, lowercase=False, tokenizer="none")
    pieces, first = Pieces.of(found), (raw / "train.de").read_text().splitlines()[0]
    assert pieces.words(found.parts["train"].sentences[0][0].tolist()) == first
    assert pieces.text("fünf &quot; .") == "fünf &quot; ."


def test_a_text_that_spells_a_mark_ends_nothing(raw):
    pieces = Pieces.of(made(raw))
    vocabulary, model = learn([["</s>", "<s>", "<pad>"]] * 9, 60, 2)
    spelt = Pieces("de", "en", "none", False, vocabulary, model)
    for encoder in (pieces, spelt):
        ids = encoder.encode([["one", "</s>", "two"]])[0].tolist()
        assert ids.count(EOS) == 1 and ids[-1] == EOS and BOS not in ids and 0 not in ids
    assert UNK in pieces.encode([["漢"]])[0].tolist()
    assert pieces.words(pieces.encode([["one", "漢", "two"]])[0].tolist()).split()[::2] == ["one", "two"]


@pytest.mark.slow
def test_the_vocabulary_is_the_same_in_every_process(tmp_path):
    """With the package's own end-of-word mark, every process would learn another vocabulary."""
    code = (
        "from repulsive.lab.text.pieces import learn\n"
        "words = [[a + b + c for a in 'xyz' for b in 'uvw' for c in 'rst']] * 3\n"
        "print(learn(words, 60, 2)[0].words)"
    )
    printed = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(printed) == 1


@pytest.mark.parametrize("names", [("train", "dev", "test"), ("train", "val", "test_2016_flickr")])
def test_names_and_packing(tmp_path, names):
    raw = write_pairs(tmp_path / "raw", names=names)
    plain = made(raw)
    for path, pack, end in (("train.de", lzma.compress, ".xz"), ("train.en", gzip.compress, ".gz")):
        whole = (raw / path).read_bytes()
        (raw / path).unlink()
        (raw / (path + end)).write_bytes(pack(whole))
    packed = made(raw, force=True)
    assert packed.vocabulary == plain.vocabulary
    sums = packed.manifest["sources"]
    assert sums["train.de.xz"] == hashlib.sha256((raw / "train.de.xz").read_bytes()).hexdigest() and len(sums) == 6
    other_way = made(raw, source="en", target="de", force=True)
    assert Pieces.of(other_way).source == "en" and other_way.vocabulary == plain.vocabulary
    ids = [found.parts["dev"].sentences[side][3].tolist() for found, side in ((plain, 0), (other_way, 1))]
    assert ids[0] == ids[1]


def test_cleaning():
    sides = [[["a"] * n for n in (1, 3, 0, 7, 2)], [["b"] * n for n in (2, 2, 1, 7, 5)]]
    assert [list(map(len, side)) for side in clean(sides, longest=6, ratio=2)] == [[1, 3], [2, 2]]


def test_training_pairs_are_cleaned_and_the_others_are_not(raw):
    for part in ("train", "test"):
        for language, line in (("de", "eins"), ("en", "one two three four")):
            path = raw / f"{part}.{language}"
            path.write_text(path.read_text() + f"{line}\n\n")
    told = made(raw, ratio=3.5).manifest
    assert told["rows"] == {"train": 200, "dev": 20, "test": 22} and told["skipped"]["train"] == 2


def test_the_first_training_pairs_can_be_used_alone(raw):
    few = made(raw, pairs=50)
    assert few.manifest["rows"]["train"] == 50 and few.manifest["settings"]["pairs"] == 50
    assert few.manifest["rows"]["dev"] == 20 and few.manifest["skipped"]["train"] == 0
    with pytest.raises(DataError, match="was prepared with pairs 50, not None"):
        made(raw)
    whole = made(raw, force=True)
    words = [Pieces.of(each).words(each.parts["train"].sentences[1][49].tolist()) for each in (few, whole)]
    assert words[0] == words[1] and "pairs" not in whole.manifest["settings"]


def test_what_subword_nmt_has_cut_is_joined():
    assert tokenizer("none")("zwei@@ und@@ zwanzig @-@ mal neu@@") == ["zweiundzwanzig", "@-@", "mal", "neu"]


def test_punctuation_made_plain_first():
    text = "It’s „good“ – isn’t it?"
    assert tokenizer("normalized-en")(text) == tokenizer("moses-en")("It's \"good\" - isn't it?")
    assert tokenizer("normalized-en")(text) != tokenizer("moses-en")(text)


def test_moses_knows_abbreviations_by_their_capitals():
    assert tokenizer("moses-en", lowercase=True)("Dr. Who isn't here.") == ["dr.", "who", "isn", "'t", "here", "."]


# further test sets


@pytest.fixture
def talks(raw):
    """Write a further test set: a pair that cleaning would drop, one with a letter unknown to train, an empty one."""
    folder = raw.parent / "talks"
    folder.mkdir()
    (folder / "test.raw.de").write_text("Eins.\nZwei zwei.\n\n", encoding="utf-8")
    (folder / "test.raw.en").write_text(f"One{' one' * 99}.\nTwo 漢.\n\n", encoding="utf-8")
    return folder / "test.raw"


def test_a_further_test_set_keeps_all_its_pairs_and_changes_nothing_else(raw, talks):
    alone = made(raw)
    found = made(raw, also={"talks": talks}, force=True)
    assert found.vocabulary == alone.vocabulary and list(found.parts) == ["train", "dev", "test", "talks"]
    for part in alone.parts:
        for one, other in zip(alone.parts[part].sentences, found.parts[part].sentences, strict=True):
            assert one.values.tolist() == other.values.tolist()
    part, pieces = found.parts["talks"], Pieces.of(found)
    assert [pieces.words(part.sentences[0][i].tolist()) for i in range(3)] == ["eins .", "zwei zwei .", ""]
    assert UNK in part.sentences[1][1].tolist() and part.sentences[1][2].tolist() == [EOS]
    assert pieces.words(part.sentences[1][0].tolist()) == f"one{' one' * 99} ."
    references = json.loads(found.extra["references.json"])
    assert references["talks"]["text"] == [f"One{' one' * 99}.", "Two 漢.", ""]
    assert references["talks"]["words"] == [f"one{' one' * 99} .", "two 漢 .", ""]
    told = found.manifest
    assert told["rows"]["talks"] == 3 and told["skipped"]["talks"] == 0 and told["unknown"]["talks"] > 0
    assert told["settings"]["also"] == {"talks": "test.raw"} and "also" not in alone.manifest["settings"]
    german = (raw.parent / "talks" / "test.raw.de").read_bytes()
    assert told["sources"]["talks/test.raw.de"] == hashlib.sha256(german).hexdigest()
    assert "talks.safetensors" in told["files"] and list(Prepared.load(found.folder).parts) == list(found.parts)


def test_further_test_sets_count_in_what_was_prepared(raw, talks):
    before = made(raw, also={"talks": talks, "again": raw / "test"})
    assert before.manifest["sources"].keys() > {"test.de", "again/test.de", "talks/test.raw.en"}
    stamp = (raw.parent / "out" / "manifest.json").stat().st_ino
    elsewhere = talks.parent.rename(raw.parent / "moved") / "test.raw"
    assert len(made(raw, also={"again": str(raw / "test"), "talks": str(elsewhere)}).parts["talks"]) == 3
    assert (raw.parent / "out" / "manifest.json").stat().st_ino == stamp
    for also in ({}, {"talks": elsewhere}, {"talks": elsewhere, "other": raw / "test"}):
        with pytest.raises(DataError, match=r"was prepared with also \{'talks': 'test.raw', 'again': 'test'\}, not"):
            made(raw, also=also)
    path = elsewhere.with_name("test.raw.en")
    path.write_text(path.read_text(encoding="utf-8").replace("Two", "Too"), encoding="utf-8")
    with pytest.raises(DataError, match=r"was prepared with another talks/test\.raw\.en"):
        made(raw, also={"talks": elsewhere, "again": raw / "test"})


def test_a_further_test_set_may_be_packed(raw, talks):
    plain = made(raw, also={"talks": talks})
    for end, pack, ending in ((".de", lzma.compress, ".xz"), (".en", gzip.compress, ".gz")):
        path = talks.with_name(talks.name + end)
        path.with_name(path.name + ending).write_bytes(pack(path.read_bytes()))
        path.unlink()
    packed = made(raw, also={"talks": talks}, force=True)
    assert set(packed.manifest["sources"]) > {"talks/test.raw.de.xz", "talks/test.raw.en.gz"}
    assert packed.manifest["files"] == plain.manifest["files"]


# errors


def test_mistakes_name_file_and_line(raw):
    whole = (raw / "train.en").read_bytes()
    lines = whole.split(b"\n")
    for content, message in (
        (b"\n".join(lines[:150]) + b"\n", r"train\.en: ends after line 150, but .*train\.de has 200 lines"),
        (b"\n".join([*lines[:9], b"caf\xe9", *lines[10:]]), r"train\.en, line 10: byte 3 \(0xe9\) is not UTF-8"),
        (b"", r"train\.en: empty file"),
        (lzma.compress(whole)[:-40], r"train\.en: truncated or damaged after line \d+ .*; download it again"),
    ):
        (raw / "train.en").write_bytes(content)
        with pytest.raises(DataError, match=message):
            made(raw)
    (raw / "valid.de").unlink()
    with pytest.raises(DataError, match="no dev files in de and en; expected dev or valid or val, with"):
        made(raw)
    assert not (raw.parent / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "spacy"}, "takes moses, normalized, none"),
        ({"vectors": "glove.txt"}, "leave out --vectors"),
        ({"ratio": 0.5}, "ratio=0.5: expected at least 1"),
        ({"pairs": 0}, "pairs=0: expected at least 1"),
        ({"target": "de"}, "give two different endings"),
        ({"target": "fr"}, "no train files in de and fr"),
        ({"dev": 3}, "has no option 'dev'; it has source, target, ratio"),
        ({"longest": 1}, "cleaning left none of 200 training pairs"),
    ],
)
def test_settings_that_cannot_be(raw, settings, message):
    with pytest.raises(DataError, match=message):
        made(raw, **settings)


@pytest.mark.parametrize("name", ["Talks", "my talks", "a/b", "..", "14", "", "naïve", "-o"])
def test_a_further_test_set_has_a_plain_name(raw, talks, name):
    with pytest.raises(DataError, match="expected a name of lower-case letters, digits"):
        made(raw, also={name: talks})


@pytest.mark.parametrize("name", ["train", "dev", "test", "vectors", "notes", "seconds"])
def test_a_further_test_set_has_a_name_of_its_own(raw, talks, name):
    with pytest.raises(DataError, match=f"--also '{name}': the name is taken"):
        made(raw, also={name: talks})


def test_mistakes_in_further_test_sets(raw, talks):
    for base, message in (
        (talks.with_name("test"), r"no file .*talks/test\.de, plain, \.xz or \.gz"),
        (talks.with_name("test.raw.de"), r"no file .*test\.raw\.de\.de, .*; give the path without \.de and \.en"),
        (raw, r"no file .*raw\.de"),
    ):
        with pytest.raises(DataError, match=f"--also 'talks': {message}"):
            made(raw, also={"talks": base})
    english = talks.with_name("test.raw.en")
    for content, message in (
        (b"One.\n", r"test\.raw\.en: ends after line 1, but .*test\.raw\.de has 3 lines"),
        (b"One.\ncaf\xe9\n\n", r"test\.raw\.en, line 2: byte 3 \(0xe9\) is not UTF-8"),
        (b"\n\n\n", r"test\.raw\.en: empty file"),
    ):
        english.write_bytes(content)
        with pytest.raises(DataError, match=message):
            made(raw, also={"talks": talks})
    english.unlink()
    with pytest.raises(DataError, match=r"no file .*test\.raw\.en, plain"):
        made(raw, also={"talks": talks})
    assert not (raw.parent / "out").exists()


def test_without_the_packages_the_error_says_what_to_install(raw, monkeypatch):
    found = made(raw)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[translation\]'"):
        made(raw, force=True)
    assert len(Prepared.load(found.folder).parts["train"]) == 200  # loading needs neither package
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="need the package tokenizers"):
        made(raw, tokenizer="none", force=True)


def test_the_verb(raw, monkeypatch, capsys):
    monkeypatch.chdir(raw.parent)
    command = ["prepare", "translation", "--data", "raw", "--most", "80", "--jobs", "1"]
    assert run(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "translation -> prepared/translation" and output[2].split() == ["rows", "200", "20", "20"]
    assert output[-1] == "de to en, from test.de, test.en, train.de, train.en, valid.de, valid.en"
    assert run(command) == 0 and "is prepared already" in capsys.readouterr().out
    further = [*command, "--also", "talks=raw/test", "--also", "more=raw/valid", "--out", "further"]
    assert run(further) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[1].split() == ["train", "dev", "test", "talks", "more"]
    assert output[2].split() == ["rows", "200", "20", "20", "20", "20"] and "talks/test.de, talks/test.en" in output[-1]
    assert run(further) == 0 and "is prepared already" in capsys.readouterr().out
    assert run(further[:-4] + further[-2:]) == 2 and "was prepared with also" in capsys.readouterr().err
    with pytest.raises(DataError, match="is dataset 'reviews', not translation"):
        Pieces.of(prepare("reviews", None, raw.parent / "reviews", train=5, dev=1, test=1, jobs=1))

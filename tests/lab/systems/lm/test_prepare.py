"""`repulsive prepare lm`: the tokens decode to the text, the byte counts are right, and errors are one line."""

import json
import lzma

import numpy as np
import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import DataError
from repulsive.lab.systems.electra.toy import write_corpus, write_vocabulary
from repulsive.lab.systems.lm import toy as recall
from repulsive.lab.systems.lm.data import Text, numbers
from repulsive.lab.systems.lm.prepare import TOY_LINES, plan_text, plan_toy, summarize, tokenize
from repulsive.lab.text.folders import digest
from repulsive.lab.text.wordpiece import SEP, WordPieces

TEXTS = {"train": "Ünder\n\ta  b\n\nlast", "valid": "kara kasi\n", "test": "nope.\n"}


@pytest.fixture
def files(tmp_path):
    """Write one file per part, one of them xz."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.en").write_bytes(text.encode())
    (folder / "train.en").unlink()
    (folder / "train.en.xz").write_bytes(lzma.compress(TEXTS["train"].encode()))
    return folder


def text_of(prepared, part):
    return bytes(numbers(prepared.parts[part]).tolist()).decode()


def test_bytes_are_the_text(files, tmp_path):
    made = plan_text(files, tmp_path / "out", suffix="en").make()
    assert text_of(made, "train") == TEXTS["train"] + "\n"  # the last line gets a line feed
    assert text_of(made, "dev") == TEXTS["valid"] and text_of(made, "test") == TEXTS["test"]
    assert made.bytes == {"train": 19, "dev": 10, "test": 6} and made.vocabulary == 256
    assert all(made.tokens_per_byte(part) == 1 for part in made.parts)
    assert np.load(tmp_path / "out" / "train.npy").dtype == np.uint8


def test_word_pieces_count_the_same_bytes(files, tmp_path):
    pytest.importorskip("tokenizers")
    vocabulary = write_vocabulary(tmp_path, [f"piece{i}" for i in range(300)])
    pieces = WordPieces.read(vocabulary)
    plan = plan_text(files, tmp_path / "out", suffix="en", tokenizer="wordpiece", vocabulary=vocabulary)
    made = plan.make()
    expected = [pieces.index[piece] for piece in ("kara", "kasi", SEP)]
    assert numbers(made.parts["dev"]).tolist() == expected
    assert made.bytes["dev"] == 10 and made.tokens_per_byte("dev") == 3 / 10
    assert np.load(tmp_path / "out" / "dev.npy").dtype == np.uint16 and made.vocabulary == len(pieces.pieces)
    assert made.manifest["unknown"] == {"train": 4 / 8, "dev": 0.0, "test": 1 / 3}  # four line feeds; "." is known
    assert "50.00% unknown" in summarize(made) and plan.existing() is not None


def test_large_ids_are_read_as_unsigned():
    assert numbers(torch.from_numpy(np.array([0, 40_000, 65_535], dtype=np.uint16).view(np.int16))).tolist() == [
        0,
        40_000,
        65_535,
    ]


def test_documents_are_dealt_out_and_none_is_lost(tmp_path):
    corpus = write_corpus(tmp_path)
    plan = plan_text(corpus, tmp_path / "out", dev=0.1)
    made = plan.make()
    documents = sorted(document for part in made.parts for document in text_of(made, part).split("\n\n") if document)
    assert documents == sorted(corpus.read_text().strip().split("\n\n"))
    shares = [len(made.parts[part]) / sum(made.bytes.values()) for part in ("dev", "test")]
    assert all(0.03 < share < 0.2 for share in shares)
    again = plan_text(corpus, tmp_path / "again", dev=0.1).make()
    other = plan_text(corpus, tmp_path / "other", dev=0.1, seed=1).make()
    assert torch.equal(made.parts["dev"], again.parts["dev"])
    assert not torch.equal(made.parts["dev"], other.parts["dev"])


def test_chunks_join_without_a_seam(tmp_path, monkeypatch):
    monkeypatch.setattr("repulsive.lab.systems.lm.prepare._CHUNK", 50)
    corpus = write_corpus(tmp_path, documents=40)
    made = plan_text(corpus, tmp_path / "small", dev=0.2).make()
    monkeypatch.undo()
    whole = plan_text(corpus, tmp_path / "whole", dev=0.2).make()
    assert all(torch.equal(made.parts[part], whole.parts[part]) for part in made.parts)


def test_the_toy_is_the_same_everywhere_and_needs_its_context(tmp_path):
    made = plan_toy(None, tmp_path / "toy").make()
    assert [text_of(made, part).count("\n") for part in made.parts] == list(TOY_LINES.values())
    assert not set(recall.lines(50, "0/dev")) & set(recall.lines(50, "0/test"))
    for line in recall.lines(200, 3):
        facts, _, question = line.strip().partition(" Who ")
        asked, _, answer = question.partition("? ")
        assert next(fact for fact in facts.split(". ") if asked in fact).startswith(answer.rstrip("."))


def test_the_verb_says_what_it_made_and_leaves_it_alone(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "lm", "--data", str(files), "--suffix", "en"]
    assert run(command) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.splitlines() == [
        "lm -> prepared/lm",
        "train             19 bytes             19 tokens",
        "dev               10 bytes             10 tokens",
        "test               6 bytes              6 tokens",
        "bytes, vocabulary of 256",
    ]
    assert run(command) == 0 and "is prepared already" in capsys.readouterr().out
    (files / "test.en").write_text("other\n")
    assert run(command) == 2 and "another test.en" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0 and run(["prepare", "lm-toy"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "missing.txt"], "missing.txt: no such file or folder"),
        (["--data", "empty.txt"], "empty.txt: no text"),
        (["--data", "one.txt"], "too little text for dev"),
        (["--data", "one.txt", "--tokenizer", "words"], "tokenizer='words': choose one of bytes, wordpiece"),
        (["--data", "one.txt", "--tokenizer", "wordpiece"], "give --vocabulary vocab.txt"),
        (
            ["--data", "one.txt", "--tokenizer", "wordpiece", "--vocabulary", "one.txt"],
            "one.txt: not a WordPiece vocabulary",
        ),
        (["--data", "one.txt", "--vocabulary", "one.txt"], "--vocabulary is for word pieces"),
        (["--data", "one.txt", "--lowercase"], "--lowercase is for word pieces"),
        (["--data", "one.txt", "--dev", "0.5"], "between 0 and 0.5"),
        (["--data", "one.txt", "--length", "5"], "dataset 'lm' has no option '--length'"),
        (["--data", "raw", "--suffix", "de"], "raw: no train file; expected train.de"),
        (["--data", "raw", "--suffix", "en", "--dev", "0.1"], "leave out --dev"),
        (["--data", "broken.xz"], "broken.xz: truncated or damaged"),
        ([], "needs texts to train on: give --data"),
    ],
)
def test_a_mistake_is_one_line(words, message, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPULSIVE_DATA", raising=False)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("one document\n")
    (tmp_path / "broken.xz").write_bytes(lzma.compress(b"text\n" * 1000)[:-20])
    assert run(["prepare", "lm", *words, "--out", "out"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and message in output.err
    assert not (tmp_path / "out").exists()


def test_the_toy_reads_no_data(tmp_path, capsys):
    assert run(["prepare", "lm-toy", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "is generated" in capsys.readouterr().err


def rewrite(folder, change):
    """Change a prepared folder and update its checksums."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest["files"] = {name: digest(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, m: np.save(folder / "dev.npy", np.zeros((2, 2), np.uint8)), r"expected uint8 \[N\]"),
        (lambda folder, m: np.save(folder / "dev.npy", np.zeros(4, np.int64)), r"expected uint8 \[N\], got int64"),
        (lambda folder, m: np.save(folder / "dev.npy", np.zeros(1, np.uint8)), "at least 2 tokens"),
        (lambda folder, m: m.pop("bytes"), "was not made by"),
        (lambda folder, m: m["bytes"].update(dev=0), "a part of 0 bytes"),
        (lambda folder, m: m.update(task="glue"), "is dataset 'glue', not 'lm'"),
    ],
)
def test_a_folder_of_another_content_is_refused(change, message, files, tmp_path):
    folder = tmp_path / "out"
    plan_text(files, folder, suffix="en").make()
    rewrite(folder, lambda manifest: change(folder, manifest))
    with pytest.raises(DataError, match=message):
        Text.load(folder)


def test_a_damaged_file_is_refused(files, tmp_path):
    plan_text(files, tmp_path / "out", suffix="en").make()
    with open(tmp_path / "out" / "test.npy", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="damaged"):
        Text.load(tmp_path / "out")


def test_tokenize_by_hand():
    assert tokenize("é\n", None).tolist() == [0xC3, 0xA9, 10]

"""Read and prepare GLUE: the layout of every task, errors, and the prepared folder."""

import gzip
import json
import lzma
import warnings

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import DataError
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.glue.data import (
    TASKS,
    cut_pair,
    find_glue,
    read_glue,
    stops_to_drop,
    task_named,
    without_stops,
)
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.wordpiece import WordPieces
from tests.lab.systems.glue import glue_files

pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def loud():
    """Turn warnings about skipped lines into errors, unless a test expects them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# reading


@pytest.mark.parametrize("task", TASKS)
def test_every_task_reads_what_was_written(task, tmp_path):
    """Find columns by name among all the official ones, after a byte order mark (MRPC), or without a header (CoLA)."""
    files = find_glue(glue_files.write_task(tmp_path, task), TASKS[task])
    rows = list(glue_files.rows_of(task, 80, 0))
    found = read_glue(files["train"], TASKS[task])
    assert found.texts[-1] == [second for _, second, _ in rows] and found.skipped == 0
    if len(found.texts) == 2:
        assert found.texts[0] == [first for first, _, _ in rows]
    classes = TASKS[task].classes
    assert [classes[i] if classes else f"{i:.3f}" for i in found.labels] == [label for *_, label in rows]
    answers = read_glue(files["predict"], TASKS[task], labelled=False)
    assert len(answers) == 9 and answers.indices == list(range(9)) and set(answers.labels) == {-1}
    assert ("mismatched" in files) == ("predict_mismatched" in files) == (task == "mnli")


def test_quotes_have_no_meaning(tmp_path):
    path = write(tmp_path / "dev.tsv", "sentence\tlabel", '" he said\t1', 'a "b"\t0', '"\t1')
    assert read_glue(path, TASKS["sst"]).texts == (['" he said', 'a "b"', '"'],)


def test_columns_are_found_by_name_wherever_they_stand(tmp_path):
    path = write(tmp_path / "dev.tsv", "index\tsentence1\tsentence2\tgold_label", "0\ta\tb\tneutral")
    assert read_glue(path, TASKS["mnli"]).labels == [2]
    path = write(tmp_path / "cola.tsv", "label\tsentence", "0\tA header.")  # a copy of CoLA with a header
    assert read_glue(path, TASKS["cola"]).texts == (["A header."],)


def test_rows_are_called_what_the_file_calls_them(tmp_path):
    path = write(tmp_path / "test.tsv", "id\tquestion1\tquestion2", "7\ta\tb", "3\tc\td")
    assert read_glue(path, TASKS["qqp"], labelled=False).indices == [7, 3]
    path = write(tmp_path / "test.tsv", "id\tquestion1\tquestion2", "seven\ta\tb")
    with pytest.raises(DataError, match="line 2: expected a row number, got 'seven'"):
        read_glue(path, TASKS["qqp"], labelled=False)


@pytest.mark.parametrize(("packed", "end"), [(lzma.open, ".xz"), (gzip.open, ".gz")])
def test_packed_files_and_subsets_are_found(packed, end, tmp_path):
    folder = glue_files.write_task(tmp_path, "rte") / "RTE"
    for name, other in (("train", "train_subset"), ("dev", "dev_subset")):
        with packed(folder / f"{other}.tsv{end}", "wb") as file:
            file.write((folder / f"{name}.tsv").read_bytes())
        (folder / f"{name}.tsv").unlink()
    for data in (tmp_path, folder):  # the benchmark's folder, or the task's own
        files = find_glue(data, TASKS["rte"])
        assert files["train"].name == f"train_subset.tsv{end}" and files["test"].name == f"dev_subset.tsv{end}"
        assert len(read_glue(files["train"], TASKS["rte"])) == 80


@pytest.mark.parametrize(
    ("task", "line", "why"),
    [
        ("rte", "1\tonly this", "line 3: has 2 columns, expected at least 4"),
        ("rte", "1\ta\tb\tentailment\tmore", "line 3: has 5 columns, the first line has 4"),
        ("rte", "1\t \tb\tentailment", "line 3: column 'sentence1' is empty"),
        ("rte", "1\ta\t\tentailment", "line 3: column 'sentence2' is empty"),
        ("rte", "1\ta\tb\t-", "line 3: invalid label '-', expected one of entailment, not_entailment"),
        ("sts", "1\t\t\t\t\t\t\ta\tb\t5.1", "line 3: invalid score '5.1', expected a number from 0 to 5"),
        ("sts", "1\t\t\t\t\t\t\ta\tb\thigh", "line 3: invalid score 'high', expected a number from 0 to 5"),
        ("sts", "1\t\t\t\t\t\t\ta\tb\tnan", "line 3: invalid score 'nan'"),
    ],
)
def test_bad_rows_are_named_counted_and_skipped_up_to_a_limit(task, line, why, tmp_path):
    good = {"rte": "0\ta\tb\tentailment", "sts": "0\t\t\t\t\t\t\ta\tb\t3.2"}[task]
    path = write(tmp_path / "train.tsv", glue_files.COLUMNS[task][1], good, line, good)
    with pytest.warns(UserWarning, match=f"train.tsv: 1 bad line skipped: {why}"):
        found = read_glue(path, TASKS[task], limit=1)
    assert len(found) == 2 and found.skipped == 1
    with pytest.raises(DataError, match=f"train.tsv: more than 0 bad lines; {why}"):
        read_glue(path, TASKS[task], limit=0)


def test_no_row_of_a_test_set_may_be_missing(tmp_path):
    path = write(tmp_path / "test.tsv", "index\tsentence", "0\ta", "1")
    with pytest.raises(DataError, match="more than 0 bad lines; line 3"):
        read_glue(path, TASKS["sst"], labelled=False, limit=20)


def test_files_that_cannot_be(tmp_path):
    write(tmp_path / "train.tsv", "sentence\tlabel")
    with pytest.raises(DataError, match=r"train\.tsv: no usable line"):
        read_glue(tmp_path / "train.tsv", TASKS["sst"])
    write(tmp_path / "train.tsv", "text\tlabel", "a\t1")
    with pytest.raises(DataError, match="no column 'sentence'; the header has 'text', 'label'"):
        read_glue(tmp_path / "train.tsv", TASKS["sst"])
    (tmp_path / "train.tsv").write_text("")
    with pytest.raises(DataError, match="empty file"):
        read_glue(tmp_path / "train.tsv", TASKS["sst"])
    with pytest.raises(DataError, match=r"no dev\.tsv or dev_subset\.tsv of GLUE task 'sst'"):
        find_glue(tmp_path, TASKS["sst"])


def test_names():
    assert task_named("STS-B") is task_named("sts") and task_named("CoLA").name == "cola"
    with pytest.raises(DataError, match="did you mean 'mnli'"):
        task_named("mnil")


# full stops and lengths


def test_lost_full_stops_are_noticed():
    whole, bare = ["One. Two.", "Three."], ["One Two", "Three"]
    assert stops_to_drop(whole * 50, whole) == "keep"
    assert stops_to_drop(bare * 50, whole) == "all"
    assert stops_to_drop(["One. Two", "Three"] * 50, whole) == "final"
    assert stops_to_drop(bare * 50, bare) == "keep"  # both sides lack full stops
    assert [without_stops("a. b...", which) for which in ("keep", "final", "all")] == ["a. b...", "a. b", "a b"]
    assert without_stops("...", "all") == "..."


@pytest.mark.parametrize(
    ("a", "b", "most", "kept"),
    [(5, 2, 4, (2, 2)), (2, 5, 4, (2, 2)), (3, 3, 5, (3, 2)), (1, 9, 5, (1, 4)), (2, 2, 4, (2, 2))],
)
def test_the_longer_side_is_cut_first(a, b, most, kept):
    """Compare with the official code: drop the last piece of the longer text, or of the second if they are equal."""
    first, second = cut_pair(list(range(a)), list(range(b)), most)
    assert (len(first), len(second)) == kept and first == list(range(len(first)))


# pieces


def test_pieces_are_berts(tmp_path):
    pieces = WordPieces.read(glue_files.write_vocabulary(tmp_path))
    words = [pieces.pieces[i] for i in pieces.encode(["Goodly, BÁD xyz [SEP]"])[0]]
    assert words == ["good", "##ly", ",", "bad", "[UNK]", "[UNK]", "[UNK]", "[UNK]"]  # a mark in a text is not a mark
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=True)
    texts = [second for _, second, _ in glue_files.rows_of("rte", 20)] + ["Goodly, BÁD w3.", "yes\tno w1,w2"]
    assert pieces.encode(texts) == [theirs.encode(text, add_special_tokens=False) for text in texts]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[1:], r"it lacks \[PAD\]"),
        (lambda p: [p[1], p[0], *p[2:]], r"\[PAD\] must be the first piece"),
        (lambda p: [*p, "good"], "contains a piece twice"),
    ],
)
def test_a_vocabulary_that_is_none(change, message, tmp_path):
    write(tmp_path / "vocab.txt", *change(glue_files.PIECES))
    with pytest.raises(DataError, match=rf"vocab\.txt: .*{message}"):
        WordPieces.read(tmp_path / "vocab.txt")


# preparing


def prepared(tmp_path, task, **settings):
    glue_files.write_task(tmp_path / "raw", task)
    vocabulary = glue_files.write_vocabulary(tmp_path)
    return prepare("glue", tmp_path / "raw", tmp_path / "out", glue_task=task, vocabulary=vocabulary, **settings)


def test_what_is_prepared(tmp_path):
    made = prepared(tmp_path, "mnli")
    assert list(made.parts)[:3] == ["train", "dev", "test"]
    assert set(list(made.parts)[3:]) == {"mismatched", "predict", "predict_mismatched"}
    assert made.classes == TASKS["mnli"].classes and made.manifest["settings"]["longest"] == 128
    assert made.parts["train"].labels.dtype == torch.int64 and len(made.parts["train"].sentences) == 2
    assert torch.equal(made.parts["dev"].labels, made.parts["test"].labels)  # the official development set
    assert json.loads(made.extra["indices.json"])["predict_mismatched"] == list(range(9))
    first, second, label = next(iter(glue_files.rows_of("mnli", 80, 0)))
    sides = [[made.vocabulary.words[i] for i in side[0].tolist()] for side in made.parts["train"].sentences]
    assert sides == [first.split(), second.split()] and made.classes[made.parts["train"].labels[0]] == label


def test_points_stay_points(tmp_path):
    made = prepared(tmp_path, "sts")
    labels = [float(label) for *_, label in glue_files.rows_of("sts", 80, 0)]
    assert made.classes == () and made.parts["train"].labels.dtype == torch.float32
    assert made.parts["train"].labels.tolist() == labels
    assert Prepared.load(made.folder).parts["test"].labels.dtype == torch.float32


def test_some_of_train_can_be_held_out(tmp_path):
    made = prepared(tmp_path, "rte", held_out=0.25, seed=3)
    rows = {name: len(part) for name, part in made.parts.items()}
    assert rows == {"train": 60, "dev": 20, "test": 24, "predict": 9}
    whole = sorted(" ".join(second.split()) for _, second, _ in glue_files.rows_of("rte", 80, 0))
    words = made.vocabulary.words
    both = [made.parts[name].sentences[1] for name in ("train", "dev")]
    assert sorted(" ".join(words[i] for i in side[n].tolist()) for side in both for n in range(len(side))) == whole


def test_long_rows_are_cut_and_counted(tmp_path):
    made = prepared(tmp_path, "rte", longest=8)
    lengths = torch.stack([side.lengths for side in made.parts["train"].sentences]).sum(0)
    assert int(lengths.max()) == 5 and 0 < made.manifest["cut"]["train"] < 80


def test_the_verb(tmp_path, monkeypatch, capsys):
    glue_files.write_task(tmp_path / "data" / "glue", "cola")
    vocabulary = glue_files.write_vocabulary(tmp_path)
    monkeypatch.setenv("REPULSIVE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "glue", "--task", "cola", "--vocabulary", str(vocabulary)]
    assert run(command) == 0
    output = capsys.readouterr().out
    assert "glue -> prepared/glue/cola" in output and "unlabelled         0      0      0        9" in output
    assert run(command) == 0 and "is prepared already" in capsys.readouterr().out
    vocabulary.write_text(vocabulary.read_text() + "more\n")
    assert run(command) == 2 and "another vocab.txt" in capsys.readouterr().err


def test_texts_that_lose_their_stops_are_told_of(tmp_path, capsys):
    folder = glue_files.write_task(tmp_path / "raw", "mnli") / "MNLI"
    header, *lines = (folder / "dev_matched.tsv").read_text().splitlines()
    write(folder / "dev_matched.tsv", header, *(line.replace("\tnone\t", ".\tnone\t") for line in lines))
    vocabulary = glue_files.write_vocabulary(tmp_path)
    command = ["prepare", "glue", "--task", "mnli", "--data", str(tmp_path / "raw"), "--vocabulary", str(vocabulary)]
    for more, stops in (([], 0), (["--stops", "keep"], 24)):
        out = tmp_path / f"out{stops}"
        assert run([*command, *more, "--out", str(out)]) == 0
        assert ("without their full stops, as those of train" in capsys.readouterr().out) == (stops == 0)
        stop = glue_files.PIECES.index(".")
        assert int((Prepared.load(out).parts["test"].sentences[1].values == stop).sum()) == stops


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task", "cola"], "give --vocabulary vocab.txt"),
        (["--vocabulary", "vocab.txt"], "repulsive: no GLUE task is given; give --task with one of cola, sst"),
        (["--task", "wnli", "--vocabulary", "vocab.txt"], "GLUE task 'wnli' is unknown"),
        (["--task", "cola", "--vocabulary", "other.txt"], "other.txt: no such file"),
        (["--task", "rte", "--vocabulary", "vocab.txt"], "no train.tsv or train_subset.tsv"),
        (["--task", "cola", "--vocabulary", "vocab.txt", "--held-out", "1"], "held_out=1"),
        (["--task", "cola", "--vocabulary", "vocab.txt", "--stops", "some"], "stops='some': choose one of auto, keep"),
        (["--task", "cola", "--vocabulary", "vocab.txt", "--tokenizer", "spacy"], "takes wordpiece"),
        (["--task", "cola", "--vocabulary", "vocab.txt", "--longest", "4"], "longest=4: expected at least 8"),
        (["--task", "cola", "--vocabulary", "vocab.txt", "--vectors", "vocab.txt"], "leave out --vectors"),
    ],
)
def test_mistakes_are_one_line(more, message, tmp_path, monkeypatch, capsys):
    glue_files.write_task(tmp_path / "raw", "cola")
    glue_files.write_vocabulary(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(["prepare", "glue", "--data", "raw", *more]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and message in output.err
    assert not (tmp_path / "prepared").exists()

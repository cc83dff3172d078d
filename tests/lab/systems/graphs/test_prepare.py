"""Prepare graphs: ids and vocabularies, the folder, the command and its errors."""

import json

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import DataError
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.graphs.prepare import plan_graphs
from repulsive.lab.systems.graphs.prepared import WORD, PreparedGraphs
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import UNK
from tests.lab.systems.graphs.graph_files import ROWS, WEBNLG, lines, write_archive, write_json, write_tsv, write_webnlg


def made(raw, **settings):
    return plan_graphs(raw, raw.parent / "out", **{"minimum": 1, **settings}).make()


def test_every_number_means_what_the_file_says(tmp_path):
    found = made(write_tsv(tmp_path / "raw"))
    part, known = found.parts["train"], found.vocabularies
    types = ("<material>", "<method>", "<otherscientificterm>", "<task>")
    assert known.types == types and known.words.words[: 4 + 4] == (*MARKS, *types)
    assert known.relations == ("<pad>", "<unk>", "<root>", "USED-FOR", "CONJUNCTION", "USED-FOR_inv", "CONJUNCTION_inv")
    words = known.words.words
    assert len(part) == 2 and [words[i] for i in part.titles[0]] == ["beam", "search", "."]
    assert [words[i] for i in part.types[0]] == ["<task>", "<method>", "<material>"]
    entities = [[known.entities.words[i] for i in part.entities[row]] for row in range(3)]
    assert entities == [["parsing"], ["beam", "search"], ["treebank"]] and part.types.offsets[:3].tolist() == [0, 3, 4]
    assert part.relations[0].tolist() == [[1, 3, 0], [0, 4, 2]] and part.relations[1].shape == (0, 3)
    assert known.inverse(torch.tensor([3, 4, UNK])).tolist() == [5, 6, UNK]
    assert part.copies[0].tolist() == [WORD, WORD, 1, WORD, 0, WORD, WORD, 2, WORD, 1, WORD, WORD, WORD]
    assert part.targets[0][-1] == EOS and words[int(part.targets[0][2])] == "<method>"
    assert list(part.texts_of(0)) == [0] and list(part.texts_of(1)) == [1]
    text = found.text(part.targets[0], part.copies[0], part.names[0])
    assert [text] == part.references[0] == part.reference_words[0] and text.startswith("we use beam search for")
    assert found.manifest["mentioned"]["train"] == 1 and found.manifest["rows"] == {"train": 2, "dev": 2, "test": 2}


def test_a_graph_of_webnlg_has_several_texts(tmp_path):
    unseen = {"category": "City", "triples": [["Oslo", "mayor", "Jacob_Bundsgaard"]], "texts": ["Oslo , eh ?"]}
    found = made(write_webnlg(tmp_path / "raw", test=[*WEBNLG, unseen]), tokenizer="regex")
    train, test = found.parts["train"], found.parts["test"]
    assert len(train) == 2 and len(train.targets) == 3 and train.texts.tolist() == [0, 2, 3]
    shown = [found.text(train.targets[i], train.copies[i], train.names[0]) for i in train.texts_of(0)]
    assert shown == ["the leader of aarhus is jacob bundsgaard .", "jacob bundsgaard leads aarhus ."]
    assert train.references[0] == WEBNLG[0]["texts"] and train.reference_words[0] == shown
    assert train.reference_words[1] == ["aarhus airport 's runway is 2,702 long ."]
    names = ("cityServed", "leaderName", "runwayLength")
    assert found.vocabularies.relations[3:] == (*names, *(f"{name}_inv" for name in names))
    assert test.relations[2].tolist() == [[0, UNK, 1]] and test.categories == ["Airport", "Airport", "City"]
    assert test.entities[int(test.types.offsets[2])].tolist() == [UNK] and test.titles.lengths.tolist() == [0, 0, 0]
    assert found.manifest["unseen categories"] == {"train": 0, "dev": 0, "test": 1 / 3}
    assert found.manifest["unknown relations"]["test"] == 0.25


def test_only_words_that_occur_often_enough_are_known_and_none_that_spells_a_mark(tmp_path):
    spelt = [*ROWS[0]]
    spelt[4] = "</s> <task> <pad> we <task_0> rare ."
    found = made(write_tsv(tmp_path / "raw", [*ROWS, spelt]), minimum=3)
    part, words = found.parts["train"], found.vocabularies.words
    assert [int(i) if i < 8 else words.words[i] for i in part.targets[2]] == [UNK] * 3 + ["we", 7, UNK, ".", EOS]
    assert "beam" in found.vocabularies.entities.words and "rare" not in words.words  # all words of entities are kept
    small = plan_graphs(tmp_path / "raw", tmp_path / "small", minimum=1, most=9, longest=2).make()
    assert len(small.vocabularies.words) == 9 and small.parts["train"].targets.lengths.tolist() == [3, 3, 3]
    assert small.manifest["cut"]["train"] == 3 and small.parts["train"].references == part.references


def test_all_forms_of_agenda_give_the_same_tensors(tmp_path):
    folders = [write_tsv(tmp_path / "a"), write_json(tmp_path / "b"), write_archive(tmp_path / "c")]
    for folder in folders[1:]:
        (folder / "relations.vocab").write_bytes((folders[0] / "relations.vocab").read_bytes())
    found = [plan_graphs(folder, tmp_path / f"out-{folder.name}").make() for folder in folders]
    forms = [one.manifest["settings"]["form"] for one in found]
    assert forms == ["agenda tsv", "agenda json", "agenda json"]
    for name in ("train.safetensors", "vocabularies.json", "references.json"):
        assert len({one.manifest["files"][name] for one in found}) == 1
    (folders[1] / "relations.vocab").unlink()
    named = plan_graphs(folders[1], tmp_path / "named").make().vocabularies.relations
    assert named[3:5] == ("CONJUNCTION", "USED-FOR")  # without the file: the relations of train, by code point


def test_the_folder_is_checked(tmp_path):
    out = made(write_tsv(tmp_path / "raw")).folder
    assert json.loads((out / "manifest.json").read_text())["task"] == "graphs"
    with pytest.raises(DataError, match="is dataset 'graphs', which has no sentences with labels"):
        Prepared.load(out)
    data = (out / "dev.safetensors").read_bytes()
    (out / "dev.safetensors").write_bytes(data[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"dev\.safetensors: damaged, its checksum differs"):
        PreparedGraphs.load(out)
    (out / "dev.safetensors").unlink()
    with pytest.raises(DataError, match=r"dev\.safetensors: cannot be read"):
        PreparedGraphs.load(out)
    with pytest.raises(DataError, match="nothing prepared here"):
        PreparedGraphs.load(tmp_path / "none")
    manifest = json.loads((out / "manifest.json").read_text()) | {"task": "yelp"}
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is dataset 'yelp', not 'graphs'; prepare it with: repulsive prepare graphs"):
        PreparedGraphs.load(out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vectors": "glove.txt"}, "learns its own vectors; leave out --vectors"),
        ({"tokenizer": "regex"}, "is tokenised already; leave out --tokenizer regex"),
        ({"minimum": 0}, "minimum=0: expected at least 1"),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, message):
    with pytest.raises(DataError, match=message):
        plan_graphs(write_tsv(tmp_path / "raw"), tmp_path / "out", **settings)


def test_the_function_for_any_dataset_prepares_graphs(tmp_path):
    made = prepare("graphs", write_tsv(tmp_path / "raw"), tmp_path / "out", minimum=1)
    assert isinstance(made, PreparedGraphs) and made.manifest["settings"]["form"] == "agenda tsv"
    with pytest.raises(DataError, match="dataset 'graphs' has no option 'ratio'"):
        prepare("graphs", tmp_path / "raw", tmp_path / "out", ratio=2.0)


def test_folders_that_cannot_be(tmp_path):
    raw = write_tsv(tmp_path / "raw", parts=("val", "test"))
    with pytest.raises(DataError, match=r"no preprocessed\.train\.tsv, no unprocessed\.train\.json, no train\.jsonl"):
        plan_graphs(raw, tmp_path / "out")
    write_tsv(raw)
    (raw / "relations.vocab").unlink()
    with pytest.raises(DataError, match=r"no relations\.vocab, which has the names of the relations"):
        plan_graphs(raw, tmp_path / "out")
    with pytest.raises(DataError, match="no such folder"):
        plan_graphs(tmp_path / "none", tmp_path / "out")
    with pytest.raises(DataError, match="tokenizer 'other' is unknown"):
        plan_graphs(write_webnlg(tmp_path / "web"), tmp_path / "out", tokenizer="other")


def test_the_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPULSIVE_DATA", raising=False)
    write_webnlg(tmp_path / "raw")
    command = ["prepare", "graphs", "--data", "raw", "--out", "prepared/webnlg", "--tokenizer", "regex"]
    assert run(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "graphs -> prepared/webnlg" and output[1].split() == ["train", "dev", "test"]
    assert output[2].split() == ["graphs", "2", "2", "2"] and output[3].split() == ["texts", "3", "3", "3"]
    assert output[6].split() == ["entities", "mentioned", "85.7%", "85.7%", "85.7%"]
    assert output[-1] == "webnlg: 7 words, 7 of entities, 1 types, 3 relations and their inverses"
    assert run(command) == 0 and "is prepared already" in capsys.readouterr().out
    assert run([*command, "--minimum", "1"]) == 2
    assert "was prepared with minimum 2, not 1. Choose another --out" in capsys.readouterr().err
    assert run([*command, "--minimum", "1", "--force"]) == 0
    capsys.readouterr()
    assert run(["prepare", "graphs"]) == 2 and "give --data, or set REPULSIVE_DATA" in capsys.readouterr().err
    assert run([*command, "--ratio", "2"]) == 2 and "has no option '--ratio'" in capsys.readouterr().err
    assert run(["prepare", "graph"]) == 2 and "did you mean 'graphs'?" in capsys.readouterr().err
    bad = write_tsv(tmp_path / "bad")
    (bad / "preprocessed.train.tsv").write_text(lines([[*ROWS[0][:3], "9 0 0", *ROWS[0][4:]], ROWS[1]]))
    command = ["prepare", "graphs", "--data", "bad", "--out", "out"]
    assert run([*command, "--limit", "0"]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "bad lines; line 1: relation 'USED-FOR' has entity 9, but there are 3" in output
    assert run(command) == 0
    output = capsys.readouterr()
    assert "1 bad line skipped: line 1" in output.err
    assert output.out.splitlines()[4].split() == ["skipped", "1", "0", "0"]

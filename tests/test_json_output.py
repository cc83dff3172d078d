"""`--json`: stdout holds one JSON document with the documented keys, and nothing else."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from repulsive.cli.app import app, run, verbs
from repulsive.lab.engine import tables
from repulsive.lab.judge.answers import FORMAT
from repulsive.lab.judge.criteria import CRITERIA
from tests.lab.engine import tiny

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "api" / "json.md"
NO_TABLE = {"export", "translate"}  # verbs that print no table


def documented() -> dict[str, set[str]]:
    """Each command of the page, and the keys of its document."""
    rows = re.findall(r"^\| `repulsive ([\w -]+)` \|[^|]*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {command.lower(): set(re.findall(r"`(\w+)`", keys)) for command, keys in rows}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a prepared dataset, one trained run, a small model and the files of two judges."""
    folder = tmp_path_factory.mktemp("json")
    data = tiny.make_data(folder / "prepared")
    assert run([*tiny.words(data, folder / "runs"), "--quiet"]) == 0
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "movie", "was", "great", "bad"]
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
    torch.manual_seed(7)
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=len(words), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "model")
    for name in ("first", "second"):
        lines = [json.dumps({"id": str(i), "text": f"{name} text {i}"}) for i in range(4)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def document(place, monkeypatch, capsys):
    """Run a command with `--json`; return its document and check its keys against the page."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words, page="", code=0):
        capsys.readouterr()
        assert run([*map(str, words), "--json"]) == code
        out = capsys.readouterr().out
        value = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        entry = value[0] if isinstance(value, list) else value
        assert set(entry) == documented()[page or words[0]], words
        return value

    return call


def test_every_verb_that_prints_a_table_has_the_option_and_is_documented():
    import typer

    commands = typer.main.get_group(app).commands
    for verb in set(verbs()) - NO_TABLE:
        children = getattr(commands[verb], "commands", {"": commands[verb]})
        for name, command in children.items():
            assert any("--json" in parameter.opts for parameter in command.params), (verb, name)
    named = {command.split()[0] for command in documented()}
    assert named == set(verbs()) - NO_TABLE


def test_ls(document, place):
    value = document("ls", "--out", "runs")
    (entry,) = value["runs"]
    assert entry["state"] == "done" and 0 <= entry["test"]["accuracy"] <= 1
    names = [recipe["name"] for recipe in value["recipes"]]
    assert "yelp/svgd" in names and names == sorted(names)
    assert document("ls", "yelp/svgd", page="ls recipe")["settings"]["method"]["rule"] == "svgd"


def test_heads(document):
    value = document("heads", "model")
    assert [(group["part"], group["heads"], group["d_head"]) for group in value["groups"]] == [
        (part, 4, 4) for part in "qkv"
    ]
    assert value["particles"] == 12 and value["weights"] == 3 * 16 * 16


def test_inspect(document):
    value = document("inspect", "model", "--sentence", "the movie was great", "--twins", "0")
    assert value["layers"][0]["heads"] == 4 and value["verdict"].endswith(".")
    words = ["model", "--compare", "model", "--sentence", "the movie was great", "--twins", "0"]
    value = document("inspect", *words, page="inspect --compare")
    assert value["before"]["layers"] == value["after"]["layers"] and value["removed"] == []


def test_doctor(document):
    assert document("doctor")["problems"] == []


def test_prune(document):
    words = ["--sentence", "the movie was great", "--keep", "50%", "--out", "small"]
    value = document("prune", "model", *words)
    assert value["heads"] == [4, 2] and set(value["measured"]) == {"whole", "ablated", "pruned"}


def test_train_and_evaluate(document, place):
    trained = document(*tiny.words(place / "prepared", place / "runs"), "--quiet", page="train")
    (folder,) = (place / "runs").glob("*/seed-*/..")
    evaluated = document("evaluate", folder.resolve(), "--device", "cpu")
    for value in (trained, evaluated):
        (row,) = value
        assert row["seeds"] == [0] and row["cells"]["accuracy"]["deviation"] is None
    expected = tables.rows([folder.resolve()])[0].cells["nll"].mean
    assert trained[0]["cells"]["nll"]["mean"] == expected


def test_report(document, place):
    (folder,) = (place / "runs").glob("*/seed-*/..")
    value = document("report", folder.resolve(), "--out", "report.html", "--device", "cpu", "--most", 8)
    assert value["written"] == ["report.html"] and (place / "report.html").is_file()


def test_prepare(document, place):
    words = ["prepare", "reviews", "--train", 30, "--dev", 10, "--test", 10, "--out", "made"]
    first, again = document(*words), document(*words)
    assert first["is_new"] and not again["is_new"] and first["manifest"] == again["manifest"]
    assert first["manifest"]["rows"] == {"train": 30, "dev": 10, "test": 10}


def test_reproduce_lists(document):
    assert len(document("reproduce")["artefacts"]) == 15


def test_reproduce_claims(document):
    value = document("reproduce", "claims", "--from", PAGE.parents[2] / "results", page="reproduce claims")
    assert {claim["outcome"] for claim in value["claims"]} == {"holds", "fails", "cannot say"}
    assert [path.rpartition(".")[2] for path in value["written"]] == ["md", "json", "svg"]


def test_judge(document, place):
    made = document("judge", "make", "first.jsonl", "second.jsonl", page="judge make")
    assert made["systems"] == ["first", "second"] and made["shown"] == 4
    key = json.loads((place / made["key"]).read_text())
    answers = {"format": FORMAT, "version": 1, "page": key["page"], "seal": key["seal"], "judge": "Ada"}
    chosen = [{"item": item, **dict.fromkeys(CRITERIA, "left")} for item in range(1, 5)]
    (place / "ada.json").write_text(json.dumps({**answers, "answers": chosen}))
    value = document("judge", "tally", "ada.json", "--key", made["key"], page="judge tally")
    assert value["left"] == 1.0 and value["judges"] == ["Ada"]


@pytest.mark.slow
def test_sweep_and_reproduce(document, place):
    recipe = tiny.toml(place / "prepared")
    words = ["--over", "optimizer.lr=0.001,0.01", "--jobs", 1, "--device", "cpu", "--out", "swept"]
    value = document("sweep", recipe, *words)
    assert len(value["trials"]) == 2 and value["best"]["value"] == max(trial["value"] for trial in value["trials"])
    few = ["--quick", "--jobs", 1, "--methods", "svgd", "--datasets", "yelp", "--seeds", 1, "--no-times"]
    value = document("reproduce", "table1", *few, "--set", "training.epochs=1", page="reproduce id")
    assert value["failed"] == [] and value["reports"][0]["id"] == "table1"


def test_a_mistake_prints_no_document(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for words in (["ls", "yelp/svdg"], ["heads", "nowhere"], ["evaluate", "nowhere"], ["prune", "model"]):
        more = ["--out", "x"] if words[0] == "prune" else []
        assert run([*words, *more, "--json"]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1

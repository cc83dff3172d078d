"""Trained runs whose prepared data are gone: translate, report and export work, evaluation says what it needs."""

import hashlib
import io
import json
import shutil
import sys

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import DataError, RunError
from repulsive.lab.engine.run_reader import ASSETS, RUN
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.export import export
from repulsive.lab.runs.report import Options, gather
from repulsive.lab.runs.score import load_run, load_trained, score
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.lm.prepare import plan_toy
from repulsive.lab.systems.registry import open_recipe
from tests.lab.engine import tiny
from tests.lab.systems import running
from tests.lab.systems.electra import words
from tests.lab.systems.glue import toy_glue
from tests.lab.systems.graphs import toy_graphs
from tests.lab.systems.translation import digits

CPU = torch.device("cpu")


class Hidden:
    """Moves a prepared folder away for the length of a block."""

    def __init__(self, folder):
        self.folder, self.away = folder, folder.with_name("away")

    def __enter__(self):
        self.folder.rename(self.away)

    def __exit__(self, *_):
        self.away.rename(self.folder)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A folder with prepared reviews, another dataset, and a run."""
    folder = tmp_path_factory.mktemp("reviews")
    tiny.make_data(folder / "prepared")
    prepare("reviews", None, folder / "other", train=40, dev=20, test=30, jobs=1)
    tiny.train(folder / "prepared", folder / "run" / "seed-0")
    return folder


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    for package in ("sacremoses", "tokenizers", "sacrebleu"):
        pytest.importorskip(package)
    folder = digits.make_data(tmp_path_factory.mktemp("digits"), size=200, further="test")
    digits.train(folder, folder / "run" / "seed-0")
    return folder


@pytest.fixture(scope="module")
def electra(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = words.make_data(tmp_path_factory.mktemp("words"), packing="official")
    words.train(folder, folder / "run" / "seed-0", "training.epochs=1")
    return folder


@pytest.fixture
def copy(reviews, tmp_path):
    """A copy of the run on reviews, to be damaged."""
    shutil.copytree(reviews / "run", tmp_path / "run")
    return RunFolder(tmp_path / "run" / "seed-0")


def titles(content):
    return [panel.title for panel in content.panels]


def note(content):
    return " ".join(content.panels[-1].lead)


def translations(folder, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Eins zwei.\nDrei.\n")))
    assert run(["translate", str(folder / "run"), "--device", "cpu"]) == 0
    return capfd.readouterr().out


# classification


def test_a_report_shows_what_the_run_stored(reviews):
    options = Options(device="cpu", foreign=reviews / "other")
    whole = gather([reviews / "run"], options)
    with Hidden(reviews / "prepared"):
        content = gather([reviews / "run"], options)
    assert content.table == whole.table and content.charts == whole.charts and content.facts == whole.facts
    assert content.title == whole.title == "Heads on reviews"
    assert [x.tokens for x in content.examples] == [x.tokens for x in whole.examples] and len(content.examples) == 8
    for one, other in zip(content.examples, whole.examples, strict=True):
        assert one.evidence == other.evidence and torch.equal(one.readings[0].attention, other.readings[0].attention)
    missing = ["Effect of each head", "Pruning"]
    assert [x for x in titles(whole) if x not in missing] + ["Not in this report"] == titles(content)
    assert "the prepared data are not at" in note(content)
    assert content.panels[-2].sheets[0].rows == whole.panels[-1].sheets[0].rows  # entropy on foreign texts


def test_evaluation_needs_its_own_data_or_others(reviews, capfd):
    own = score([reviews / "run"], "test", reviews / "prepared", "cpu")
    with Hidden(reviews / "prepared"):
        again = score([reviews / "run"], "test", reviews / "away", "cpu")
        assert str(again[0].cells) == str(own[0].cells)
        assert run(["evaluate", str(reviews / "run"), "--device", "cpu"]) == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1 and "needs its prepared data" in message and "--data" in message
    with pytest.raises(RunError, match=r"vocabulary.json differs"):
        score([reviews / "run"], "test", reviews / "other", "cpu")


def test_assets_are_part_of_the_run(reviews):
    trained = RunFolder(reviews / "run" / "seed-0")
    assets = trained.assets()
    assert sorted(assets) == ["data.json", "examples.safetensors", "vocabulary.json"]
    assert sorted(path.name for path in (trained.path / ASSETS).iterdir()) == sorted(assets)
    described = json.loads(assets["data.json"])
    assert described["classes"] == ["1", "2", "3", "4", "5"] and described["sizes"]["train"] == 300
    assert assets["vocabulary.json"] == (reviews / "prepared" / "vocabulary.json").read_bytes()


def test_run_folders_without_assets_work_while_their_data_exist(copy, reviews):
    facts = json.loads((copy.path / RUN).read_text())
    del facts["assets"]
    (copy.path / RUN).write_text(json.dumps(facts))
    shutil.rmtree(copy.path / ASSETS)
    expected = load_run(RunFolder(reviews / "run" / "seed-0"), CPU)[1].state_dict()
    found = load_trained(copy, CPU)[1].state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert len(gather([copy.path.parent], Options(device="cpu", most=5)).examples) == 8
    with Hidden(reviews / "prepared"), pytest.raises(DataError, match="nothing prepared here"):
        load_trained(copy, CPU)


@pytest.mark.parametrize("damage", ["changed", "removed", "link", "link to the folder"])
def test_damaged_assets_are_refused(damage, copy, tmp_path):
    file = copy.path / ASSETS / "vocabulary.json"
    if damage == "changed":
        file.write_bytes(file.read_bytes().replace(b"the", b"THE"))
    elif damage == "removed":
        file.unlink()
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.parent.rename(tmp_path / "elsewhere")
        (copy.path / ASSETS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"vocabulary\.json|data\.json") as error:
        load_trained(copy, CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"), [("../recipe.json", None), ("data.json", b"[]"), ("vocabulary.json", b'["<pad>", "<unk>"]')]
)
def test_assets_that_no_training_writes_are_refused(name, content, copy):
    """The checksums fit: such a folder was made on purpose."""
    facts = json.loads((copy.path / RUN).read_text())
    if content is None:
        facts["assets"][name] = "0"
    else:
        (copy.path / ASSETS / name).write_bytes(content)
        facts["assets"][name] = hashlib.sha256(content).hexdigest()
    (copy.path / RUN).write_text(json.dumps(facts))
    with pytest.raises(RunError) as error:
        load_trained(copy, CPU)
    assert "\n" not in str(error.value)


# translation


def test_translations_stay_the_same(translation, monkeypatch, capfd):
    whole = translations(translation, monkeypatch, capfd)
    with Hidden(translation / "prepared"):
        assert translations(translation, monkeypatch, capfd) == whole
    assert whole.count("\n") == 2


def test_a_report_on_a_translator_has_its_attention(translation):
    whole = gather([translation / "run"], Options(device="cpu", most=3, part="further"))
    with Hidden(translation / "prepared"):
        content = gather([translation / "run"], Options(device="cpu", part="further"))
    assert [x.texts for x in content.layered] == [x.texts for x in whole.layered] and len(content.layered) == 8
    for one, other in zip(content.layered, whole.layered, strict=True):
        pairs = zip(one.readings["digits"], other.readings["digits"], strict=True)
        assert all(torch.equal(a.weights, b.weights) for a, b in pairs)
    assert "Similarity of heads" in titles(content) and "the prepared data are not at" in note(content)


# the other systems


def test_an_export_stays_the_same(electra, tmp_path):
    export(electra / "run", tmp_path / "whole")
    with Hidden(electra / "prepared"):
        export(electra / "run", tmp_path / "alone")
        content = gather([electra / "run"], Options(device="cpu"))
    names = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert len(names) > 4
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    assert "Similarity of heads" in titles(content)


def test_reports_on_graphs_and_language_models_compare_weights(tmp_path):
    graphs = toy_graphs.make_data(tmp_path / "graphs")
    toy_graphs.train(graphs, graphs / "run" / "seed-0", "training.epochs=1")
    text = tmp_path / "lm" / "prepared"
    plan_toy(None, text).make()
    small = ["model.width=16", "model.heads=2", "data.length=32", "data.steps=6", "training.epochs=1"]
    running.train(open_recipe("lm/toy-svgd", [f"data.folder={text}", *small]), text.parent / "run" / "seed-0")
    for folder in (graphs, text.parent):
        expected = load_run(RunFolder(folder / "run" / "seed-0"), CPU)[1].state_dict()
        with Hidden(folder / "prepared"):
            content = gather([folder / "run"], Options(device="cpu"))
            found = load_trained(RunFolder(folder / "run" / "seed-0"), CPU)[1].state_dict()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert "Similarity of heads" in titles(content) and "Effect of each head" not in titles(content)


def test_a_report_on_glue_compares_weights(tmp_path):
    pytest.importorskip("transformers")
    data = toy_glue.make_data(tmp_path, "cola")
    toy_glue.train(data, "cola", tmp_path / "run" / "seed-0", "training.epochs=1")
    whole = gather([tmp_path / "run"], Options(device="cpu"))
    with Hidden(data / "cola"):
        content = gather([tmp_path / "run"], Options(device="cpu"))
    assert content.table == whole.table and content.facts == whole.facts and titles(content) == titles(whole)

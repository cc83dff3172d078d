"""Forged results are refused: numbers must agree with checksums and with the recorded answers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load, save

from repulsive.cli.app import run
from repulsive.errors import RunError
from repulsive.lab.engine import result_checksums
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.scores import check_scores, recomputed
from repulsive.lab.engine.tables import rows
from tests.lab.engine import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("forged")
    return tiny.train(tiny.make_data(place / "prepared"), place / "run").path


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def change(path, action):
    value = json.loads(path.read_text())
    action(value)
    path.write_text(json.dumps(value))


def mark_all_correct(folder):
    """Mark every answer on the test set of a run as correct."""
    items = load((folder / "test.safetensors").read_bytes())
    items["correct"] = torch.ones_like(items["correct"])
    (folder / "test.safetensors").write_bytes(save(items))


def test_an_unchanged_run_is_read(copy, recwarn):
    (row,) = rows([copy])
    assert row.cells["accuracy"].mean == RunFolder(copy).metrics("test")["accuracy"]
    sums = RunFolder(copy).result["sha256"]
    assert set(sums) == {"result", "dev.safetensors", "test.safetensors", "metrics.jsonl"}
    assert not [warning for warning in recwarn if "checksum" in str(warning.message)]


@pytest.mark.parametrize("part", ["test", "dev"])
def test_changed_answers_are_refused(copy, part):
    path = copy / f"{part}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=rf"{part}\.safetensors: was changed after the training wrote it"):
        rows([copy], part)


def test_changed_numbers_are_refused(copy, capsys):
    change(copy / "result.json", lambda result: result["test"].update(accuracy=1.0))
    with pytest.raises(RunError, match=r"result\.json: was changed"):
        rows([copy])
    assert run(["evaluate", str(copy)]) == 2
    error = capsys.readouterr().err
    assert "was changed" in error and error.count("\n") == 1


def test_changed_curves_are_refused(copy):
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text.replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(RunError, match=r"metrics\.jsonl: was changed"):
        RunFolder(copy).lines()


def test_forged_checksums_do_not_hide_forged_numbers(copy):
    """Numbers with a recomputed checksum still contradict the recorded answers."""
    result = json.loads((copy / "result.json").read_text())
    result["test"]["accuracy"] = 1.0
    (copy / "result.json").write_text(json.dumps(result_checksums.with_new_checksum(result)))
    with pytest.raises(RunError, match=r"but result\.json says 1; one of the two was changed"):
        rows([copy])
    mark_all_correct(copy)
    files = {"test.safetensors": result_checksums.digest((copy / "test.safetensors").read_bytes())}
    del result["sha256"]
    (copy / "result.json").write_text(json.dumps(result_checksums.with_checksums(result, files)))
    with pytest.raises(RunError, match="contrary to its own logits and labels"):
        rows([copy])


def test_folders_of_earlier_versions_are_read_with_a_warning(copy):
    change(copy / "result.json", lambda result: result.pop("sha256"))
    with pytest.warns(UserWarning, match="has no checksum"):
        (row,) = rows([copy])
    assert row.cells["accuracy"].mean > 0
    mark_all_correct(copy)
    refused = pytest.raises(RunError, match="one of the two was changed")
    with pytest.warns(UserWarning, match="has no checksum"), refused:
        rows([copy])


@pytest.mark.parametrize("sums", [5, [], {"result": 3}, {}, "x"])
def test_damaged_checksums_are_refused(copy, sums):
    change(copy / "result.json", lambda result: result.update(sha256=sums))
    with pytest.raises(RunError, match="was changed"):
        _ = RunFolder(copy).result


def test_scores_may_be_added_later(copy):
    folder = RunFolder(copy)
    result = folder.result
    result["test"]["sacrebleu"] = 3.0
    folder.add_scores(result)
    assert RunFolder(copy).metrics("test")["sacrebleu"] == 3.0


def test_rounding_is_forgiven_and_a_thousandth_is_not(tmp_path):
    items = {"nll": torch.tensor([0.5, 1.5])}
    check_scores({"nll": 1.0 + 5e-5}, items, tmp_path)
    with pytest.raises(RunError, match=r"its answers give nll 1, but result\.json says 1\.001"):
        check_scores({"nll": 1.001}, items, tmp_path)


def test_metrics_recomputed_by_hand():
    items = {"correct": torch.tensor([True, False]), "nll": torch.tensor([1.0, 3.0])}
    assert recomputed(items) == {"accuracy": 0.5, "nll": 2.0}

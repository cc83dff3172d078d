"""Means, deviations and comparisons of runs, by hand."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from repulsive.errors import RunError
from repulsive.lab.engine.result_tables import terminal_tables
from repulsive.lab.engine.tables import as_markdown, as_plain, cell, ended, rows, runs_in
from repulsive.terminal.document import as_document


def write_run(folder, label, seed, correct, labels=None, nll=0.5):
    folder.mkdir(parents=True)
    correct = torch.tensor(correct, dtype=torch.bool)
    labels = torch.zeros(len(correct), dtype=torch.int64) if labels is None else torch.tensor(labels)
    items = {"correct": correct, "nll": torch.full((len(correct),), nll, dtype=torch.float64), "labels": labels}
    save_file(items, folder / "test.safetensors")
    (folder / "recipe.json").write_text(json.dumps({"seed": seed, "label": label}))
    metrics = {"accuracy": float(correct.double().mean()), "nll": nll}
    (folder / "result.json").write_text(json.dumps({"label": label, "test": metrics}))


def test_known_answers(tmp_path):
    for seed, (first, second) in enumerate([([1, 0, 0, 0], [1, 1, 0, 0]), ([1, 1, 0, 0], [1, 1, 1, 1])]):
        write_run(tmp_path / "a" / f"seed-{seed}", "A", seed, first)
        write_run(tmp_path / "b" / f"seed-{seed}", "B", seed, second)
    a, b = rows([tmp_path / "a", tmp_path / "b"])
    assert (a.label, a.seeds, a.against) == ("A", (0, 1), {})
    assert a.cells["accuracy"].mean == 0.375
    assert a.cells["accuracy"].deviation == pytest.approx(0.125 * math.sqrt(2))  # of a sample
    assert b.against["accuracy"].difference == 0.375  # 0.25 and 0.5
    assert b.against["nll"].difference == 0
    lines = as_markdown([a, b]).splitlines()
    assert lines[2] == "| A | 2 | 0.3750 ± 0.1768 | 0.5000 ± 0.0000 |"
    assert lines[5].startswith("- B against A, accuracy: +0.3750 ")


def test_seeds_in_common_are_compared(tmp_path):
    for seed in (0, 10, 2):
        write_run(tmp_path / "a" / f"seed-{seed}", "A", seed, [1, 0])
    write_run(tmp_path / "b" / "seed-2", "B", 2, [1, 1])
    write_run(tmp_path / "b" / "seed-7", "B", 7, [0, 0])
    a, b = rows([tmp_path / "a", tmp_path / "b"])
    assert a.seeds == (0, 2, 10)
    assert b.against["accuracy"].difference == 0.5  # seed 2 alone
    assert str(cell([0.25])) == "0.2500"


def test_json_of_one_seed_is_json(tmp_path):
    write_run(tmp_path / "a", "A", 0, [1, 0])
    text = as_document(list(map(as_plain, rows([tmp_path / "a"]))))
    (row,) = json.loads(text, parse_constant=pytest.fail)  # called for NaN, which JSON does not have
    assert row["cells"]["accuracy"] == {"mean": 0.5, "deviation": None} and row["folder"] == str(tmp_path / "a")


@pytest.mark.parametrize(("correct", "labels"), [([1, 0, 1], None), ([1, 0], [3, 4])])
def test_runs_on_other_data_are_not_compared(correct, labels, tmp_path):
    write_run(tmp_path / "a", "A", 0, [1, 0])
    write_run(tmp_path / "b", "B", 0, correct, labels)
    assert [row.against for row in rows([tmp_path / "a", tmp_path / "b"])] == [{}, {}]


@pytest.mark.parametrize("full", [False, True])
def test_rows_without_a_comparison_are_explained(full, tmp_path):
    write_run(tmp_path / "a", "A", 0, [1, 0])
    write_run(tmp_path / "b", "B", 0, [1, 1])
    write_run(tmp_path / "c", "C", 1, [1, 1])  # another seed
    write_run(tmp_path / "d", "D", 0, [1, 1, 0])  # other items
    notes = [
        block for block in terminal_tables(rows([tmp_path / name for name in "abcd"]), full) if isinstance(block, str)
    ]
    assert notes[-1].startswith("Not compared with A: C, D (no runs of the same seed")
    compared = terminal_tables(rows([tmp_path / "a", tmp_path / "b"]), full)
    assert not any("Not compared" in str(block) for block in compared)


def test_runs_that_have_not_ended(tmp_path):
    write_run(tmp_path / "a" / "seed-0", "A", 0, [1, 0])
    write_run(tmp_path / "b" / "seed-0", "B", 0, [1, 0])
    (tmp_path / "b" / "seed-0" / "result.json").unlink()
    assert list(runs_in(tmp_path / "b")) == [0]
    assert ended([tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"]) == [tmp_path / "a"]
    with pytest.raises(RunError, match="holds no finished run; rerun the command that trained it to resume"):
        rows([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(RunError, match=f"name the runs of one or more recipes: {tmp_path / 'a'}, {tmp_path / 'b'}"):
        rows([tmp_path])
    with pytest.raises(RunError, match=r"nowhere: no such folder; `repulsive ls` lists runs"):
        rows([tmp_path / "nowhere"])


def test_two_runs_of_one_seed_are_an_error(tmp_path):
    write_run(tmp_path / "a" / "seed-0", "A", 0, [1, 0])
    write_run(tmp_path / "a" / "seed-0-copy", "A", 0, [1, 1])
    with pytest.raises(RunError, match=r"seed-0 and .*seed-0-copy: both hold seed 0; move one of them elsewhere"):
        rows([tmp_path / "a"])


def test_rows_with_the_same_label_are_named_by_their_folders(tmp_path):
    for folder in ("ma/cola", "ma/rte", "svgd/rte", "plain"):
        write_run(tmp_path / folder, "plain" if folder == "plain" else "MA", 0, [1, 0])
    paths = [tmp_path / folder for folder in ("ma/cola", "ma/rte", "svgd/rte", "plain")]
    assert [row.label for row in rows(paths)] == ["MA (cola)", f"MA ({paths[1]})", f"MA ({paths[2]})", "plain"]

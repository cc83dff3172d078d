"""The table of GLUE over tasks and seeds."""

import json

import pytest

from repulsive.cli.app import run
from repulsive.errors import RunError
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.table import as_markdown, system
from tests.lab.systems.glue import toy_glue
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.mark.slow
def test_tasks_and_seeds_in_one_command(data, tmp_path, capsys):
    shared = [word for change in (*toy_glue.TINY, "training.epochs=1") for word in ("--set", change)]
    recipes = []
    for task in ("cola", "sts"):
        own = tmp_path / f"{task}.toml"
        own.write_text(f'extends = "glue/{task}"\n[data]\nfolder = "{data / task}"\n')
        recipes.append(str(own))
    words = ["--seeds", "2", "--markdown", "--device", "cpu", "--out", str(tmp_path / "runs")]
    assert run(["train", *recipes, *shared, *words]) == 0
    output = capsys.readouterr().out
    assert "| CoLA | 2 |" in output and "| STS-B | 2 |" in output and "against" not in output
    found = system("toy", tmp_path / "runs")
    assert found.seeds == {"cola": 2, "sts": 2} and found.cells["cola"].deviation >= 0


def test_the_table(tmp_path):
    def made(name, task, seed, value, start=False):
        folder = tmp_path / name / task / f"seed-{seed}{'-mnli' if start else ''}"
        folder.mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps({"task": "glue", "seed": seed, "data": {"task": task}}))
        metrics = {TASKS[task].metric: value, "nll": 9.0}
        (folder / "result.json").write_text(json.dumps({"test": metrics}))
        sums = {"start/best/step-1/tensors.safetensors": "0"} if start else {"start/model.safetensors": "0"}
        (folder / "run.json").write_text(json.dumps({"data": sums}))

    for number, task in enumerate(TASKS):
        for seed in (0, 1):
            made("ma", task, seed, 0.5 + number / 100 + seed / 50)
    made("ma", "rte", 0, 0.9, start=True)
    made("rma", "cola", 0, 0.625)
    first, second = system("MA", tmp_path / "ma"), system("RMA", tmp_path / "rma")
    assert first.cells["cola"].mean == pytest.approx(51.0) and first.cells["cola"].deviation == pytest.approx(2**0.5)
    assert first.average() == pytest.approx(54.5) and first.average(True) == pytest.approx(54.5 + (90 - 58) / 8)
    assert second.average() is None
    lines = as_markdown([first, second]).splitlines()
    assert lines[0] == (
        "| system | CoLA | SST-2 | MRPC | STS-B | QQP | MNLI | QNLI | RTE | RTE from MNLI | mean | "
        "mean, RTE from MNLI | seeds |"
    )
    assert lines[2].startswith("| MA | 51.0 ± 1.4 |") and lines[2].endswith("| 90.0 | 54.5 | 58.5 | 1-2 |")
    assert lines[3] == "| RMA | 62.5 |  |  |  |  |  |  |  |  |  |  | 1 |"
    made("rma/again", "cola", 0, 0.5)
    with pytest.raises(RunError, match="is cola, seed 0, and so is"):
        system("RMA", tmp_path / "rma")
    with pytest.raises(RunError, match="holds no finished run of GLUE"):
        system("none", tmp_path / "nothing")

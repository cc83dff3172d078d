"""The notebooks run from top to bottom, and print what their texts say."""

import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def printed_by(name: str, folder: Path, monkeypatch) -> tuple[str, list]:
    """Run a notebook in an empty folder; return what it prints, and all outputs."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert list(folder.iterdir()) == []
    printed = [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]
    return "".join(printed), outputs  # libraries draw progress bars on stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_without_pictures(path):
    assert path.stat().st_size < 30_000
    for cell in cells(path, "code"):
        compile("".join(cell["source"]), str(path), "exec")
        assert {output["output_type"] for output in cell["outputs"]} <= {"stream"}
        assert not any("/" in line and ".py" in line for o in cell["outputs"] for line in o["text"])  # no paths


@pytest.mark.slow
def test_repulsion_spreads_the_weights_of_heads(tmp_path, monkeypatch):
    printed, outputs = printed_by("heads.ipynb", tmp_path, monkeypatch)
    line = r"^{} .* cosine ([+-]\d\.\d+)  effective"
    cosines = {name: re.findall(line.format(name), printed, re.M) for name in ("plain", "repulsive")}
    assert all(len(found) == 6 for found in cosines.values())
    assert all(abs(float(cosine)) < 0.15 for cosine in cosines["plain"])
    assert all(-0.334 < float(cosine) < -0.15 for cosine in cosines["repulsive"])
    assert [float(share) > 60 for share in re.findall(r"accuracy (\d+)%", printed)] == [True, True]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_repulsion_between_logits_makes_logits_differ_where_weights_do_not(tmp_path, monkeypatch):
    printed, outputs = printed_by("logits.ipynb", tmp_path, monkeypatch)
    found = re.findall(r"^(\w+) +step +(\d+)  cosine of weights ([+-][\d.]+)  of logits ([+-][\d.]+)$", printed, re.M)
    end = {name: (float(weights), float(logits)) for name, step, weights, logits in found if step == "200"}
    assert all(abs(weights) < 0.1 for weights, _ in end.values())
    assert end["plain"][1] > 0.1 and -1 / 3 <= end["repulsive"][1] < -0.2
    losses = [float(loss) for loss in re.findall(r"loss on the test set ([\d.]+)", printed)]
    assert abs(losses[0] - losses[1]) < 0.1  # "about the same"
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_a_pruned_model_is_smaller_and_computes_what_the_ablated_one_does(tmp_path, monkeypatch):
    printed, _ = printed_by("prune.ipynb", tmp_path, monkeypatch)
    found = re.findall(r"^(\w+) +([\d,]+) parameters, loss ([\d.]+)$", printed, re.M)
    sizes = {name: int(size.replace(",", "")) for name, size, _ in found}
    losses = {name: float(loss) for name, _, loss in found}
    assert sizes["pruned"] < 0.9 * sizes["before"] == 0.9 * sizes["ablated"]
    assert losses["before"] < losses["pruned"] == losses["ablated"] > losses["recovered"] == losses["loaded"]

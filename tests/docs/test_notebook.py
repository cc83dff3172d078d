"""The notebook runs from top to bottom, and prints what its text says."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "heads.ipynb"


def cells(kind: str) -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_it_is_kept_small_and_without_pictures():
    assert NOTEBOOK.stat().st_size < 30_000
    for cell in cells("code"):
        compile("".join(cell["source"]), str(NOTEBOOK), "exec")
        assert {output["output_type"] for output in cell["outputs"]} <= {"stream"}
        assert not any("/" in line and ".py" in line for o in cell["outputs"] for line in o["text"])  # no paths


@pytest.mark.slow
def test_it_runs_and_repulsion_spreads_the_heads(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    line = r"^{} .* cosine ([+-]\d\.\d+)  effective"
    cosines = {name: re.findall(line.format(name), printed, re.M) for name in ("plain", "repulsive")}
    assert all(len(found) == 6 for found in cosines.values())
    assert all(abs(float(cosine)) < 0.15 for cosine in cosines["plain"])
    assert all(-0.334 < float(cosine) < -0.15 for cosine in cosines["repulsive"])
    assert [float(share) > 60 for share in re.findall(r"accuracy (\d+)%", printed)] == [True, True]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert list(tmp_path.iterdir()) == []

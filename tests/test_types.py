"""The public names: types that catch misspelt settings, exports, and lazy imports."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

RIGHT = """
import torch
from repulsive import SPOS, SVGD, CollapsedHeads, CosineLadder, HeadReport, HeadSlice, Rule, find_heads, repel
from repulsive.diagnostics.similarity import mean_cosines
from repulsive.integrations import lightning, transformers
from repulsive.integrations.accelerate import repel_prepared
from repulsive.metrics.classification import overlap
from repulsive.metrics.compare import compare
from repulsive.particles import Hinge

def use(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rule: Rule, x: torch.Tensor) -> None:
    repel(model, optimizer, rule)
    repel(model, optimizer, "sphere", "first", "qk", "encoder", "head", layout="strided", order="repel-clip")
    repel(model, optimizer, SPOS(), layers=[0, 1], noise_in="parameter", verbose=True)
    find_heads(model, layers="last", where="cross")
    SVGD(kernel="imq", space="sphere", bandwidth="released-lower", prior="gaussian", alpha="auto", ratio=0.03)
    SVGD(kernel=Hinge(0.7), space="sphere", alpha=lambda step: 0.1 * step)
    SVGD(bandwidth=2.0)
    SPOS(noise="released")
    CosineLadder(rung="derivative")
    lightning.RepulsiveCallback("sphere", layers="first", noise_in="auto", order="repel-clip")
    transformers.RepulsiveCallback(rule, layers=[0], max_norm=1.0)
    repel_prepared(None, model, optimizer, rule="spos", noise_in="gradient")
    overlap(x, "cosine")
    compare(x, x, "both")
    mean_cosines(x, space="attention")
"""
WRONG = {
    'SVGD(space="shpere")': "space",
    'SVGD(kernel="rfb")': "kernel",
    'SVGD(bandwidth="median")': "bandwidth",
    'SVGD(alpha="aut")': "alpha",
    'SVGD(prior="flat")': "prior",
    'SPOS(noise="white")': "noise",
    'CosineLadder(rung="first")': "rung",
    'repel(model, optimizer, "shpere")': "repel",
    'repel(model, optimizer, layers="frist")': "layers",
    'repel(model, optimizer, where="encodr")': "where",
    'repel(model, optimizer, particle="atom")': "particle",
    'repel(model, optimizer, layout="stride")': "layout",
    'repel(model, optimizer, order="clip")': "order",
    'repel(model, optimizer, noise_in="air")': "noise_in",
    "repel(model, optimizer, alpha=0.1)": "alpha",
    "from repulsive import rebel": "rebel",
    'find_heads(model, where="encodr")': "where",
    'lightning.RepulsiveCallback("shpere")': "RepulsiveCallback",
    'lightning.RepulsiveCallback(layers="frist")': "layers",
    "lightning.RepulsiveCallback(alpha=0.1)": "alpha",
    'transformers.RepulsiveCallback(noise_in="air")': "noise_in",
    'repel_prepared(None, model, optimizer, where="encodr")': "where",
    'repel_prepared(None, model, optimizer, rule="shpere")': "rule",
    'overlap(x, "mas")': "overlap",
    'compare(x, x, "seed")': "compare",
    'mean_cosines(x, space="weights")': "space",
}
# Not followed, as in the settings of the project: they take minutes, and may not be installed.
CONFIG = """
[mypy]
[mypy-accelerate.*,lightning.*,pytorch_lightning.*,transformers.*]
ignore_missing_imports = True
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_finds_misspelt_words(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    script = tmp_path / "words.py"
    script.write_text(RIGHT + "".join(f"    {line}\n" for line in WRONG))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    options = ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    options += ["--config-file", str(tmp_path / "mypy.ini")]
    out, err, _ = api.run([*options, str(script)])
    found = dict(line.split(": error: ") for line in out.splitlines() if ": error: " in line)
    first = len(RIGHT.splitlines()) + 1
    lines = {f"{script}:{first + number}": word for number, word in enumerate(WRONG.values())}
    assert found.keys() == lines.keys(), out + err
    assert all(word in found[line] for line, word in lines.items()), out


def test_what_signatures_name_is_exported():
    import repulsive

    assert {"Rule", "HeadReport", "HeadSlice", "CollapsedHeads", "UnknownSetting"} <= set(repulsive.__all__)
    assert all(hasattr(repulsive, name) for name in repulsive.__all__)
    assert set(repulsive.__all__) <= set(dir(repulsive))
    assert not hasattr(repulsive, "rebel")

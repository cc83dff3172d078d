"""Examples run."""

import pytest

from tests.scripts import run_example

NAMES = ("plain", "control:", "published:", "sphere,")  # how the rows of the quickstart's table begin


def test_quickstart(tmp_path):
    rows = [line.split() for line in run_example("quickstart.py", tmp_path, "--steps", "150").splitlines()]
    columns = {row[0]: [float(word) for word in row[-4:]] for row in rows if row and row[0] in NAMES}
    assert set(columns) == set(NAMES)
    cosine, norm = ({name: column[i] for name, column in columns.items()} for i in (2, 3))
    assert cosine["sphere,"] < cosine["plain"] < cosine["control:"]
    # After so few steps the published rule's heads are still more alike than plain ones: smoothing acts first.
    assert cosine["published:"] < cosine["control:"]
    assert norm["published:"] > norm["plain"]


@pytest.mark.slow
def test_ensemble(tmp_path):
    lines = run_example("ensemble.py", tmp_path, "--steps", "100", "--seeds", "1").splitlines()
    scores = {line[:22].strip(): [float(word) for word in line[22:].split()] for line in lines[1:-1]}
    assert len(scores) == 5
    accuracy, _, auroc, disagreement = scores["plain"]
    assert accuracy > 0.5 and auroc > 0.6
    assert scores["outputs, weight 10/N"][3] > disagreement  # members differ more on unseen classes


@pytest.mark.slow
def test_experts(tmp_path):
    lines = run_example("experts.py", tmp_path, "--steps", "30", "--seeds", "1").splitlines()
    rows = {(line[:12].strip(), line[13:33].strip()): line[33:].split() for line in lines[1:-1]}
    assert len(rows) == 8
    for start in ("independent", "copies"):
        cosine = {rule: float(cells[-2]) for (where, rule), cells in rows.items() if where == start}
        assert cosine["sphere, ratio 0.3"] < cosine["recommended"] < cosine["plain"]

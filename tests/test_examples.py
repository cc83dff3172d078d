"""Examples run."""

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

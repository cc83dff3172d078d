"""Problems of heads that several measurements in a row show: which heads, since when, and how much."""

from repulsive.monitoring.measurement import LayerMeasurement, Measurement
from repulsive.monitoring.problems import Detector, Thresholds


def layer(cosines=None, heads=5, written=None):
    """A layer whose heads have the given cosines, {(i, j): cosine}, and else 0."""
    rows = [[float(i == j) for j in range(heads)] for i in range(heads)]
    for (i, j), cosine in (cosines or {}).items():
        rows[i][j] = rows[j][i] = cosine
    return LayerMeasurement(
        "blocks.0", "layer 0", cosine=tuple(map(tuple, rows)), written=tuple(written or [1.0] * heads)
    )


def observe(*layers, **thresholds):
    """Problems of a sequence of measurements, at steps 0, 10, 20, ..."""
    detector = Detector(Thresholds(**thresholds))
    for number, one in enumerate(layers):
        detector.observe(Measurement(10 * number, (one,)))
    return [(one.kind, one.heads, one.since, one.step) for one in detector.problems], detector.problems


def test_duplicates_that_share_a_head_are_one_problem_with_the_smallest_cosine():
    found, problems = observe(
        layer({(0, 2): 0.99, (1, 4): 0.97, (2, 3): 0.96, (0, 3): 0.98}), duplicate=0.95, confirm=1
    )
    assert sorted(found) == [("duplicate", (0, 2, 3), 0, 0), ("duplicate", (1, 4), 0, 0)]
    texts = {one.heads: one.message for one in problems}
    assert "heads 0, 2 and 3 have" in texts[0, 2, 3] and "(cosine at least 0.96)" in texts[0, 2, 3]
    assert "heads 1 and 4 have" in texts[1, 4] and "(cosine 0.97)" in texts[1, 4]


def test_chains_of_duplicates_are_joined_in_any_order():
    chain = {(0, 3): 0.99, (1, 2): 0.99, (2, 3): 0.99}  # the last pair joins the other two
    found, _ = observe(layer(chain), duplicate=0.95, confirm=1)
    assert found == [("duplicate", (0, 1, 2, 3), 0, 0)]


def test_dead_heads_of_a_layer_are_one_problem_with_the_largest_share():
    found, problems = observe(layer(written=[1.0, 0.001, 1.0, 0.002, 1.0]), dead=0.01, confirm=1)
    assert found == [("dead", (1, 3), 0, 0)] and "(at most 0.2 % of" in problems[0].message


def test_a_problem_needs_measurements_in_a_row_and_is_reported_once():
    bad, good = layer({(0, 1): 0.99}), layer()
    found, _ = observe(bad, good, bad, bad, bad, good, bad, bad, bad, duplicate=0.95, confirm=3)
    assert found == [("duplicate", (0, 1), 20, 40)]

"""Forest plots: what lies outside the axis."""

import re

from repulsive.lab.paper.forest_plot import Row, draw_forest


def marks(low, mean, high):
    """Dots, arrows and numbers of a row on an axis from -5 to 3."""
    picture = draw_forest("", [Row("ours", (mean, low, high))], (-5, 3), "", [])
    return picture.count('class="dot"'), picture.count('class="arrow"'), re.findall(r">([+-]\d+\.\d)<", picture)


def test_a_mean_outside_the_axis_is_a_number():
    assert marks(-1, 0.5, 2) == (1, 0, [])
    assert marks(-7, 0.5, 6) == (1, 2, [])
    assert marks(-41.2, -33.0, -24.9) == (0, 1, ["-33.0"])
    assert marks(1.0, 4.25, 9) == (0, 1, ["+4.2"])

"""No cell can break a Markdown table."""

import pytest

from repulsive.safety.markdown import escaped, format_table


def test_cells_are_joined_with_one_space():
    assert format_table(["a", "b"], [["1", ""]]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 |  |"]
    assert format_table(["a"], []).splitlines() == ["| a |", "| --- |"]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("**bold** `code` [link](x)", "**bold** `code` [link](x)"),
        ("1 | 2", r"1 \| 2"),
        (r"1 \| 2", r"1 \| 2"),
        (r"1 \\| 2", r"1 \\\| 2"),
        ("two\nlines\r\nand \u2028 more", "two lines and   more"),
        (escaped("x | <b>"), escaped("x | <b>")),
    ],
)
def test_a_cell_cannot_end_its_cell_or_its_row(cell, shown):
    assert format_table(["a"], [[cell]]).splitlines()[-1] == f"| {shown} |"


def test_rows_have_as_many_cells_as_the_head():
    with pytest.raises(ValueError, match="expected 2 cells in a row of the table, got 1"):
        format_table(["a", "b"], [["1"]])

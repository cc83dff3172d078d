"""The GLUE tasks as tiny files in the official layout, and a vocabulary for them; the package has them."""

from repulsive.lab.systems.glue.toy import (
    CLASSES,
    COLUMNS,
    PIECES,
    WORDS,
    lines_of,
    rows_of,
    write_task,
    write_vocabulary,
)

__all__ = ["CLASSES", "COLUMNS", "PIECES", "WORDS", "lines_of", "rows_of", "write_task", "write_vocabulary"]

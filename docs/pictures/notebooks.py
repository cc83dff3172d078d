"""Draw the figures of the notebooks for their pages on the site; the notebooks themselves are stored without pictures.

    PYTHONPATH=. python docs/pictures/notebooks.py    # writes notebook-*.svg into this folder; two minutes on one core

The cells of each notebook run in an empty folder. The hooks of the site show the figure below the cell that draws it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from studies.dark_figures import follow_color_scheme

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
WIDTH = 8.0  # inches: text as large as that of the page


def draw(notebook: Path) -> None:
    """Run the cells of a notebook up to its figure, and store it."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {"__name__": "__notebook__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)
            if plt.get_fignums():
                break
    figure = plt.gcf()
    figure.set_size_inches(WIDTH, WIDTH * figure.get_figheight() / figure.get_figwidth())
    picture = HERE / f"notebook-{notebook.stem}.svg"
    figure.savefig(picture, metadata={"Date": None})
    plt.close("all")
    follow_color_scheme(picture)


def main() -> None:
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "repulsive", "svg.fonttype": "none", "font.size": 8})
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        if "plt.show()" in notebook.read_text(encoding="utf-8"):
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                draw(notebook)
                os.chdir(HERE)


if __name__ == "__main__":
    main()

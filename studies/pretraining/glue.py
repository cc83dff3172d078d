"""Print the paper's table of GLUE from finished runs.

    repulsive train glue/cola glue/sst ... --seeds 5 --set model.start=DIR --out runs/ma
    python -m studies.pretraining.glue ma=runs/ma rma=runs/rma

Scores are those of the benchmark's development sets, by each task's own metric, times 100: mean and standard deviation
over seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from repulsive.errors import RepulsiveError
from repulsive.lab.systems.glue.table import as_markdown, system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", metavar="NAME=FOLDER", help="name of a row, and the folder of its runs")
    parser.add_argument("--part", default="test", help="evaluated part; only MNLI has `mismatched`")
    arguments = parser.parse_args()
    try:
        rows = []
        for word in arguments.systems:
            name, _, folder = word.rpartition("=")
            rows.append(system(name or folder, Path(folder), arguments.part))
    except RepulsiveError as error:
        print(f"studies.pretraining.glue: {error}", file=sys.stderr)
        return 2
    print(as_markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the table and the forest plots of docs/replication.md and README.md from the files in results/.

    python -m studies.replication            # write both
    python -m studies.replication --check    # report whether both agree with the results

`repulsive reproduce claims` prints the same table; rows and verdicts are in `repulsive.lab.paper.result_claims`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from repulsive.lab.paper.claims_report import as_markdown, draw
from repulsive.lab.paper.result_claims import ACCURACY, claims
from repulsive.lab.paper.result_files import ResultFiles

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "replication.md"
PICTURES = ROOT / "docs" / "pictures"
FIGURES = {  # file -> panels; empty: all
    PICTURES / "replication.svg": (),
    PICTURES / "replication-accuracy.svg": (ACCURACY,),
}
BEGIN, END = "<!-- replication: begin; written by studies/replication.py -->", "<!-- replication: end -->"


def replaced(page: str, text: str) -> str:
    """Return the page with the text between the two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    options = parser.parse_args(words)
    rows, page = claims(ResultFiles(RESULTS)), PAGE.read_text(encoding="utf-8")
    text, figures = replaced(page, as_markdown(rows)), {path: draw(rows, panels) for path, panels in FIGURES.items()}
    if options.check:
        is_current = text == page and all(path.read_text(encoding="utf-8") == svg for path, svg in figures.items())
        print("up to date" if is_current else "out of date: run python -m studies.replication")
        return int(not is_current)
    PAGE.write_text(text, encoding="utf-8")
    for path, svg in figures.items():
        path.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

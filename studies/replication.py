"""Write the table and the forest plot of docs/replication.md from the files in results/.

    python -m studies.replication            # write both
    python -m studies.replication --check    # report whether both agree with the results

`repulsive reproduce claims` prints the same table; rows and verdicts are in `repulsive.lab.paper.result_claims`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from repulsive.lab.paper.claims_report import as_markdown, draw
from repulsive.lab.paper.result_claims import claims
from repulsive.lab.paper.result_files import ResultFiles

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "replication.md"
FIGURE = ROOT / "docs" / "pictures" / "replication.svg"
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
    text, figure = replaced(page, as_markdown(rows)), draw(rows)
    if options.check:
        is_current = text == page and FIGURE.read_text(encoding="utf-8") == figure
        print("up to date" if is_current else "out of date: run python -m studies.replication")
        return int(not is_current)
    PAGE.write_text(text, encoding="utf-8")
    FIGURE.write_text(figure, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

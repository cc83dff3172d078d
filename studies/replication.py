"""Write tables and forest plots of the replication pages and the README from the files in results/.

    python -m studies.replication            # write all
    python -m studies.replication --check    # report whether all agree with the results

docs/replication.md shows the main claims, docs/replication-details.md all rows. `repulsive reproduce claims` prints the
same rows; they are listed in `repulsive.lab.paper.classifier_claims`, `method_claims` and `system_claims`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from repulsive.lab.paper import classifier_claims
from repulsive.lab.paper.all_claims import judge_claims
from repulsive.lab.paper.claims_report import as_markdown, draw, main_claims
from repulsive.lab.paper.result_claims import ACCURACY
from repulsive.lab.paper.result_files import ResultFiles

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
BEGIN, END = "<!-- replication: begin; written by studies/replication.py -->", "<!-- replication: end -->"


def replaced(page: str, text: str) -> str:
    """Return the page with the text between the two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def make_files(docs: Path) -> dict[Path, str]:
    """Make the text of all pages and figures."""
    claims, _ = judge_claims(ResultFiles(RESULTS))
    main, classifiers = main_claims(claims), claims[: len(classifier_claims.ROWS)]  # in the order of `all_claims.ROWS`
    rows = {"replication.md": main, "replication-details.md": claims}
    tables = {name: as_markdown(shown, short=True) for name, shown in rows.items()}
    figures = {
        "replication-details.svg": draw(claims),
        "replication-accuracy.svg": draw(classifiers, (ACCURACY,)),
    }
    pages = {docs / name: replaced((docs / name).read_text(encoding="utf-8"), text) for name, text in tables.items()}
    return pages | {docs / "pictures" / name: svg for name, svg in figures.items()}


def main(words: list[str] | None = None, docs: Path = DOCS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a file is out of date")
    options = parser.parse_args(words)
    files = make_files(docs)
    if options.check:
        old = [p.name for p, text in files.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
        print(f"out of date: {', '.join(old)}; run python -m studies.replication" if old else "up to date")
        return int(bool(old))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

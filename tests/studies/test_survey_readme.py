"""The page of the survey agrees with the files in results/survey."""

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "results"
PAGE = (RESULTS / "survey" / "README.md").read_text(encoding="utf-8")
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8")


def statuses(library):
    table = json.loads((RESULTS / "survey" / f"{library}.json").read_text())["results"]
    return {entry["architecture"]: entry["status"] for entry in table}


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_shares(library):
    found = list(statuses(library).values())
    complete = sum(status in ("table", "inferred") for status in found)
    total = complete + sum(status in ("partly", "missed", "refused", "failed") for status in found)
    assert re.search(rf"\bOf {total}\s(architectures|with)", PAGE)
    assert f"{100 * complete / total:.0f} % ({complete})" in PAGE
    row = next(line for line in INDEX.splitlines() if line.startswith("| [survey]"))
    assert f"{complete} of {total}" in row


def test_remaining_architectures_are_listed_once_each():
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", PAGE.partition("| reason |")[2], re.M)[1:]
    listed = [name for row in rows for name in row.split(", ")]
    remaining = {name for name, status in statuses("transformers").items() if status in ("partly", "missed")}
    assert sorted(listed) == sorted(remaining) and f"The {len(remaining)} that remain" in PAGE


def test_torchtune_is_complete():
    models = json.loads((RESULTS / "survey" / "packages.json").read_text())
    own = [model for model in models if model["package"] == "torchtune"]
    proved = sum(model["verdict"] == "proved" for model in own)
    assert f"torchtune ({proved} of {len(own)} proved)" in PAGE and f"{len(models)} small models" in PAGE

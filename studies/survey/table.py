"""Write the results of a survey as a table in Markdown, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from studies.survey.examine import code_version

from repulsive.safety.markdown import format_table

STATUSES = {
    "table": "every group known to the table and verified by the trace",
    "inferred": "verified, at least one group inferred by the trace",
    "partly": "verified in part; the example does not reach the rest (a tower without input), or heads are mixed",
    "none": "no multi-head dot-product attention over tokens in the shrunk model",
    "missed": "attention that is neither known nor inferred",
    "refused": "the trace contradicts the table and cannot correct it",
    "failed": "`find_heads` raised an error",
    "does not build": "the shrunk configuration is refused",
    "does not run": "no dummy input is accepted",
    "stopped": "over the time or memory limit",
}


def write_table(
    out: Path,
    library: str,
    results: list[dict[str, Any]],
    versions: dict[str, Any] | None = None,
    repeated: Sequence[str] = (),
) -> None:
    """Write the table and the JSON of a survey; `versions` is that of an earlier table, of which some are repeated."""
    if versions is None:
        names = {library: importlib.metadata.version(library), "torch": torch.__version__}
        versions = names | {"date": str(date.today())}
    elif repeated:
        again = sorted({*versions.get("repeated", {}).get("architectures", ()), *repeated})
        versions = versions | {"repeated": {"date": str(date.today()), "architectures": again}}
    counts = Counter(r["status"] for r in results)
    verified = sum(r.get("verified", 0) for r in results)
    groups = sum(r.get("groups", 0) for r in results)
    ran = sum(counts[s] for s in ("table", "inferred", "partly", "missed", "refused", "failed"))
    good = sum(counts[s] for s in ("table", "inferred", "partly"))
    (out / f"{library}.json").write_text(
        json.dumps({"versions": versions, "counts": counts, "results": results}, indent=1)
    )
    complete = good - counts["partly"]
    codes = Counter(result.get("code", "earlier") for result in results)
    lines = [
        "# Survey: architectures whose heads are found and proved",
        "",
        f"{len(results)} architectures of {library} {versions[library]}, torch {versions['torch']}, "
        f"{versions['date']}. Made by `python -m studies.survey.run --out results/survey --library {library}`.",
        "",
        f"Of {ran} that have attention, build and run, **{complete} ({100 * complete / max(ran, 1):.0f} %) are found "
        f"and verified completely**, {counts['partly']} more in part "
        f"({100 * good / max(ran, 1):.0f} % together). Of their {groups} groups {verified} are verified by the trace; "
        f"{groups - verified} are known to the table alone, because the example did not reach them. Architectures with "
        f"a slice that the trace contradicts: {counts['refused']}.",
        "",
        "Results by version of the code that made them (cached results are reused): "
        + ", ".join(f"{code} {count}" for code, count in codes.items())
        + f"; this version is {code_version()}.",
        "",
        *_repeated(versions),
        format_table(
            ["status", "architectures", "meaning"],
            [[status, str(counts[status]), meaning] for status, meaning in STATUSES.items()],
        ),
        "",
        format_table(
            ["architecture", "status", "groups", "verified", "inferred", "families", "note"],
            [
                [
                    result["architecture"],
                    result["status"],
                    *(str(result.get(name, "")) for name in ("groups", "verified", "inferred")),
                    ", ".join(result.get("families", [])),
                    str(result["note"]).replace("|", "/").replace("\n", " ")[:160],
                ]
                for result in results
            ],
        ),
    ]
    (out / f"{library}.md").write_text("\n".join(lines) + "\n")


def _repeated(versions: dict[str, Any]) -> list[str]:
    again = versions.get("repeated")
    if not again:
        return []
    names = again["architectures"]
    return [
        f"Of these, {len(names)} were repeated until {again['date']} with the same versions: {', '.join(names)}.",
        "",
    ]

"""The table that `repulsive prepare` prints for datasets of sentences with labels."""

from __future__ import annotations

from repulsive.lab.text.prepared import Prepared


def summarize(prepared: Prepared) -> str:
    """Format sizes, classes and unknown words of every data split as a table, with the vocabulary in a line below."""
    manifest, parts = prepared.manifest, prepared.parts
    rows = [["", *parts], *([name, *(f"{manifest[name][part]:,}" for part in parts)] for name in ("rows", "skipped"))]
    if any(manifest["unlabelled"].values()):
        rows.append(["unlabelled", *(f"{manifest['unlabelled'][part]:,}" for part in parts)])
    rows.append(["cut", *(f"{manifest['cut'][part]:,}" for part in parts)])
    rows.append(["unknown words", *(f"{manifest['unknown'][part]:.2%}" for part in parts)])
    for i, name in enumerate(prepared.classes):
        rows.append([f"class {name}", *(f"{(part.labels == i).double().mean():.1%}" for part in parts.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    longest = manifest["settings"]["longest"]
    limit = f"sentences of {longest} words at most" if longest else "sentences of any length"
    return "\n".join([*lines, f"vocabulary of {len(prepared.vocabulary):,}, {limit}"])

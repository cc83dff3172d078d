"""What systems write of the same graph, beside the gold text: the table of the paper's last appendix.

    sample = Sample(title, entities, {"Gold": gold, "GraphWriter": first, "+ RMA": second})
    samples_markdown([sample]), samples_html([sample])

A text is words, and numbers where an entity is copied; or one string, whose entities are then found in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from repulsive.errors import DataError
from repulsive.pages.text import escaped, visible
from repulsive.safety.markdown import format_table

Text = str | Sequence[str | int]
_MARKED = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$-])")  # what Markdown would read as markup


@dataclass(frozen=True)
class Sample:
    """One graph and what was written of it.

    Args:
        title: of the abstract; "" where there is none.
        entities: words of each, separated by spaces.
        texts: by system, in the order of the columns, the gold text first.
    """

    title: str
    entities: Sequence[str]
    texts: Mapping[str, Text]


def samples_markdown(samples: Sequence[Sample]) -> str:
    """A table with a row for each graph and a column for each system; copied entities are bold.

    Raises:
        DataError: there is no sample, the systems differ, or a text copies an entity that is not there.
    """
    systems, titled = _columns(samples)
    heads = [*(["Title"] if titled else []), *systems]
    rows = []
    for sample in samples:
        cells = [_plain(sample.title)] if titled else []
        cells += [_written(sample, system, _plain, "**{}**") for system in systems]
        rows.append(cells)
    return format_table([*map(_plain, heads)], rows) + "\n"


def samples_html(samples: Sequence[Sample]) -> str:
    """The same as an HTML table, all text escaped; copied entities stand in `<mark>`.

    Raises:
        DataError: there is no sample, the systems differ, or a text copies an entity that is not there.
    """
    systems, titled = _columns(samples)
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in systems)
    lines = ['<table class="samples">', f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
    for sample in samples:
        if titled:
            title = escaped(" ".join(sample.title.split()))
            lines.append(f'<tr><th scope="colgroup" colspan="{len(systems)}">{title}</th></tr>')
        cells = (_written(sample, system, escaped, "<mark>{}</mark>") for system in systems)
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"]) + "\n"


def _columns(samples: Sequence[Sample]) -> tuple[list[str], bool]:
    if not samples or not samples[0].texts:
        raise DataError("no sample, or one without texts: nothing to show")
    systems = list(samples[0].texts)
    for i, sample in enumerate(samples):
        if list(sample.texts) != systems:
            raise DataError(f"sample {i} has texts of {list(sample.texts)}, the first of {systems}: give the same")
    return systems, any(sample.title.strip() for sample in samples)


def _written(sample: Sample, system: str, escape: Callable[[str], str], mark: str) -> str:
    text = sample.texts[system]
    tokens = _found(text, sample.entities) if isinstance(text, str) else text
    cells = []
    for token in tokens:
        if isinstance(token, str):
            cells.append(escape(token))
        elif 0 <= token < len(sample.entities):
            cells.append(mark.format(escape(" ".join(sample.entities[token].split()))))
        else:
            raise DataError(f"{system}: copies entity {token} of {len(sample.entities)}, numbered from 0")
    return " ".join(" ".join(cells).split())


def _found(text: str, entities: Sequence[str]) -> list[str | int]:
    """Words of a text, and numbers for the entities in it, the longest first."""
    words, names = text.split(), [entity.lower().split() for entity in entities]
    lower = text.lower().split()
    order = sorted((i for i, name in enumerate(names) if name), key=lambda i: -len(names[i]))
    found: list[str | int] = []
    at = 0
    while at < len(words):
        match = next((i for i in order if lower[at : at + len(names[i])] == names[i]), None)
        found.append(words[at] if match is None else match)
        at += 1 if match is None else len(names[match])
    return found


def _plain(text: str) -> str:
    return _MARKED.sub(r"\\\1", visible(" ".join(text.split())))

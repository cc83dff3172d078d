"""Table of generated texts beside the gold text, as in the last appendix of the paper; Markdown or HTML.

    sample = Sample(title, entities, {"Gold": gold, "GraphWriter": first, "+ RMA": second})
    samples_markdown([sample]), samples_html([sample])

A text is a list of words and entity numbers (for copied entities), or one string in which entities are searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from repulsive.errors import DataError
from repulsive.pages.text import escaped, visible

Text = str | Sequence[str | int]
_MARKED = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$-])")  # Markdown markup


@dataclass(frozen=True)
class Sample:
    """One graph and the texts generated from it.

    Args:
        title: title of the abstract; "" if there is none.
        entities: words of each entity, separated by spaces.
        texts: system -> text, in the order of the columns, the gold text first.
    """

    title: str
    entities: Sequence[str]
    texts: Mapping[str, Text]


def samples_markdown(samples: Sequence[Sample]) -> str:
    """Format a Markdown table with one row per graph and one column per system; copied entities are bold.

    Raises:
        DataError: there is no sample, the systems differ, or a text copies an entity that does not exist.
    """
    systems, titled = _columns(samples)
    heads = [*(["Title"] if titled else []), *systems]
    lines = [f"| {' | '.join(map(_plain, heads))} |", f"| {' | '.join('---' for _ in heads)} |"]
    for sample in samples:
        cells = [_plain(sample.title)] if titled else []
        cells += [_cell(sample, system, _plain, "**{}**") for system in systems]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def samples_html(samples: Sequence[Sample]) -> str:
    """Format an HTML table with all text escaped; copied entities are in `<mark>`.

    Raises:
        DataError: there is no sample, the systems differ, or a text copies an entity that does not exist.
    """
    systems, titled = _columns(samples)
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in systems)
    lines = ['<table class="samples">', f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
    for sample in samples:
        if titled:
            title = escaped(" ".join(sample.title.split()))
            lines.append(f'<tr><th scope="colgroup" colspan="{len(systems)}">{title}</th></tr>')
        cells = (_cell(sample, system, escaped, "<mark>{}</mark>") for system in systems)
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"]) + "\n"


def _columns(samples: Sequence[Sample]) -> tuple[list[str], bool]:
    if not samples or not samples[0].texts:
        raise DataError("expected at least one sample with texts, got none")
    systems = list(samples[0].texts)
    for i, sample in enumerate(samples):
        if list(sample.texts) != systems:
            raise DataError(
                f"sample {i} has texts of {list(sample.texts)}, the first sample of {systems}: they must be the same"
            )
    return systems, any(sample.title.strip() for sample in samples)


def _cell(sample: Sample, system: str, escape: Callable[[str], str], mark: str) -> str:
    text = sample.texts[system]
    tokens = _with_entities(text, sample.entities) if isinstance(text, str) else text
    cells = []
    for token in tokens:
        if isinstance(token, str):
            cells.append(escape(token))
        elif 0 <= token < len(sample.entities):
            cells.append(mark.format(escape(" ".join(sample.entities[token].split()))))
        else:
            raise DataError(f"{system}: copies entity {token}, but there are {len(sample.entities)}, numbered from 0")
    return " ".join(" ".join(cells).split())


def _with_entities(text: str, entities: Sequence[str]) -> list[str | int]:
    """Split a text into words and replace entities by their numbers; longer entities are matched first."""
    words, names = text.split(), [entity.lower().split() for entity in entities]
    lower = text.lower().split()
    order = sorted((i for i, name in enumerate(names) if name), key=lambda i: -len(names[i]))
    tokens: list[str | int] = []
    at = 0
    while at < len(words):
        match = next((i for i in order if lower[at : at + len(names[i])] == names[i]), None)
        tokens.append(words[at] if match is None else match)
        at += 1 if match is None else len(names[match])
    return tokens


def _plain(text: str) -> str:
    return _MARKED.sub(r"\\\1", visible(" ".join(text.split())))

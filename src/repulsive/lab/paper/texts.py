"""What graph writers wrote: the sample of the paper's last appendix, and files for human judges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from repulsive.errors import RunError
from repulsive.lab.engine.files import write_text
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.comparison import TABLES
from repulsive.lab.paper.datasets import DataSet, look
from repulsive.lab.paper.outcome import LABELS, Report
from repulsive.lab.paper.running import Options, RunSet, Tell
from repulsive.lab.systems.graphs.prepared import GraphPart, PreparedGraphs
from repulsive.lab.systems.graphs.task import GraphWriting, GraphWritingTask
from repulsive.lab.systems.registry import from_tables
from repulsive.lab.text.tokens import PAD
from repulsive.pages.html.document import document, header, write_whole
from repulsive.pages.sample_table import Sample, samples_html, samples_markdown

TABLE = next(table for table in TABLES if table.id == "table4")
SHOWN = 3  # graphs


class SampleFigure:
    """The appendix's example; an artefact as those of `comparison`."""

    id = "sample"
    title = "what the systems write about the same graph"
    source = "Appendix E"

    def needs(self, options: Options) -> list[DataSet]:
        return TABLE.needs(options)

    def rows(self, options: Options) -> list[RunSet]:
        return TABLE.rows(options)

    def report(self, options: Options, tell: Tell) -> Report:
        texts, files = [], []
        for data in self.needs(options):
            samples = some_samples(_first_runs(data, options), SHOWN)
            texts.append(f"{data.name}:\n\n{samples_markdown(samples).rstrip()}")
            lead = "The gold text, and what the first seed of each method writes. Marked: entities of the graph."
            body = header(f"Texts from {data.name}", lead) + f"<section>{samples_html(samples)}</section>"
            page = options.out / f"{self.id}-{data.name}.html"
            files.append(Path(write_whole(page, document(f"Texts from {data.name}", body))))
        found = [look(data, options.data, options.toy, options.changes) for data in self.needs(options)]
        return Report(self.id, self.title, self.source, found, texts=texts, files=files)


def some_samples(runs: Mapping[str, RunFolder], count: int) -> list[Sample]:
    """The first graphs with the most entities: there is something to tell of them."""
    task, written = open_texts(runs)
    part = task.data.parts["test"]
    order = sorted(range(len(part)), key=lambda graph: -len(part.names[graph]))[:count]
    return [
        Sample(
            title_of(part, task.data, graph),
            part.names[graph],
            {"Gold": part.reference_words[graph][0]} | {name: texts[graph] for name, texts in written.items()},
        )
        for graph in sorted(order)
    ]


def open_texts(runs: Mapping[str, RunFolder]) -> tuple[GraphWritingTask, dict[str, list[str]]]:
    """The task of some runs on the same data, and by label what they wrote about its test graphs.

    Raises:
        RunError: there is no run.
    """
    if not runs:
        raise RunError("no run of graph writing has ended; the same command goes on where it stopped")
    first = next(iter(runs.values()))
    recipe = from_tables(first.recipe, str(first.path))
    assert isinstance(recipe, GraphWriting)
    task = GraphWritingTask(recipe)
    return task, {label: task.texts("test", _tokens(run.items("test")["hypotheses"])) for label, run in runs.items()}


def title_of(part: GraphPart, data: PreparedGraphs, graph: int) -> str:
    """A graph's title in words; "" where it has none."""
    return " ".join(data.vocabularies.words.words[i] for i in part.titles[graph].tolist())


def write_lines(path: Path, task: GraphWritingTask, texts: Sequence[str]) -> Path:
    """A file as `repulsive judge make` takes it."""
    part, lines = task.data.parts["test"], []
    for graph, text in enumerate(texts):
        told = {"title": title_of(part, task.data, graph), "entities": part.names[graph]}
        gold = part.reference_words[graph][0]
        lines.append(json.dumps({"id": str(graph), "text": text, "input": told, "gold": gold}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")
    return path


def first_runs(data: DataSet, options: Options, methods: Sequence[str]) -> dict[str, RunFolder]:
    """Method -> the run of its lowest seed that has ended."""
    rows = TABLE.on(data, options)
    ended = {name: rows[name].finished(options) for name in methods if name in rows}
    return {name: runs[min(runs)] for name, runs in ended.items() if runs}


def _first_runs(data: DataSet, options: Options) -> dict[str, RunFolder]:
    found = first_runs(data, options, list(TABLE.methods))
    return {LABELS[name]: run for name, run in found.items()}


def _tokens(hypotheses: Tensor) -> list[Sequence[int]]:
    return [line[line != PAD].tolist() for line in hypotheses]

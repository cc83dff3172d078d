"""Texts that graph-to-text runs wrote: the samples of Appendix E, and files for human judges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from repulsive.errors import RunError
from repulsive.lab.engine.files import write_text
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.datasets import Dataset, inspect_dataset
from repulsive.lab.paper.method_tables import TABLES
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.report import Report, label_of
from repulsive.lab.paper.run_sets import RunSet
from repulsive.lab.systems.graphs.prepared import GraphPart, PreparedGraphs
from repulsive.lab.systems.graphs.task import GraphWriting, GraphWritingTask
from repulsive.lab.systems.registry import from_tables
from repulsive.lab.text.tokens import PAD
from repulsive.pages.html.document import document, header, write_whole
from repulsive.pages.sample_table import Sample, samples_html, samples_markdown

GRAPH_TABLE = next(table for table in TABLES if table.id == "table4")
SAMPLES = 3  # number of graphs that are shown


class SampleTexts:
    """Sample texts of Appendix E; an `Artefact`."""

    id = "sample"
    title = "texts by all systems for the same graphs"
    source = "Appendix E"

    def required_datasets(self, options: Options) -> list[Dataset]:
        return GRAPH_TABLE.required_datasets(options)

    def run_sets(self, options: Options) -> list[RunSet]:
        return GRAPH_TABLE.run_sets(options)

    def report(self, options: Options, log: Log) -> Report:
        texts, files = [], []
        for dataset in self.required_datasets(options):
            runs = first_runs(dataset, options, list(GRAPH_TABLE.methods))
            samples = choose_samples({label_of(name): run for name, run in runs.items()}, SAMPLES)
            texts.append(f"{dataset.name}:\n\n{samples_markdown(samples).rstrip()}")
            lead = "The gold text, and the texts of the first seed of each method. Entities of the graph are marked."
            body = header(f"Texts from {dataset.name}", lead) + f"<section>{samples_html(samples)}</section>"
            page = options.out / f"{self.id}-{dataset.name}.html"
            files.append(Path(write_whole(page, document(f"Texts from {dataset.name}", body))))
        prepared = [inspect_dataset(dataset, options) for dataset in self.required_datasets(options)]
        return Report(self.id, self.title, self.source, prepared, texts=texts, files=files)


def choose_samples(runs: Mapping[str, RunFolder], count: int) -> list[Sample]:
    """Choose the test graphs with the most entities, and collect the texts of all runs for them."""
    task, written = load_texts(runs)
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


def load_texts(runs: Mapping[str, RunFolder]) -> tuple[GraphWritingTask, dict[str, list[str]]]:
    """Load the task of some runs on the same data, and label -> the texts that a run wrote about the test graphs.

    Raises:
        RunError: there is no run.
    """
    if not runs:
        raise RunError("no graph-to-text run has finished; rerun the same command to resume")
    first = next(iter(runs.values()))
    recipe = from_tables(first.recipe, str(first.path))
    assert isinstance(recipe, GraphWriting)
    task = GraphWritingTask(recipe)
    texts = {label: task.texts("test", _token_ids(run.items("test")["hypotheses"])) for label, run in runs.items()}
    return task, texts


def title_of(part: GraphPart, data: PreparedGraphs, graph: int) -> str:
    """Return a graph's title as text; "" if it has no title."""
    return " ".join(data.vocabularies.words.words[i] for i in part.titles[graph].tolist())


def write_judge_file(path: Path, task: GraphWritingTask, texts: Sequence[str]) -> Path:
    """Write the texts of one system in the format of `repulsive judge make`."""
    part, lines = task.data.parts["test"], []
    for graph, text in enumerate(texts):
        shown = {"title": title_of(part, task.data, graph), "entities": part.names[graph]}
        gold = part.reference_words[graph][0]
        lines.append(json.dumps({"id": str(graph), "text": text, "input": shown, "gold": gold}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")
    return path


def first_runs(dataset: Dataset, options: Options, methods: Sequence[str]) -> dict[str, RunFolder]:
    """Return method -> its finished run with the lowest seed; methods without a finished run are left out."""
    run_sets = GRAPH_TABLE.runs_on(dataset, options)
    finished = {name: run_sets[name].finished(options) for name in methods if name in run_sets}
    return {name: runs[min(runs)] for name, runs in finished.items() if runs}


def _token_ids(hypotheses: Tensor) -> list[Sequence[int]]:
    return [line[line != PAD].tolist() for line in hypotheses]

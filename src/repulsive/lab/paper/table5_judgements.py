"""Table 5, human evaluation: count the judges' answers or, if there are none, write the page to send to judges."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.engine.files import write_text
from repulsive.lab.judge.answers import FORMAT, read_all
from repulsive.lab.judge.criteria import CRITERIA
from repulsive.lab.judge.key import FORMAT as KEY
from repulsive.lab.judge.key import Key, read_json, read_key
from repulsive.lab.judge.make import make
from repulsive.lab.judge.tally import Tally, as_markdown, tally
from repulsive.lab.judge.texts import Text, read_texts
from repulsive.lab.paper.datasets import DATASETS, Dataset, PreparedData, inspect_dataset
from repulsive.lab.paper.graph_texts import GRAPH_TABLE, first_runs, load_texts, write_judge_file
from repulsive.lab.paper.mismatch import Mismatch
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.report import Number, Report, Row
from repulsive.lab.paper.run_sets import RunSet
from repulsive.lab.paper.verdicts import Finding, judge
from repulsive.lab.text.folders import MANIFEST
from repulsive.metrics.compare import Comparison

SYSTEMS = ("rma", "gw")  # wins of the first system are counted
ITEMS = 50
NO_JUDGES = "no judgements yet: send the page to judges, then pass their files with --judgements"
TIE_MARGINS = (0.0, 0.1, 0.3)  # one scripted judge each: differences of overlap up to this count as ties


class JudgementTable:
    """Table 5, human judgements of generated texts; an `Artefact`."""

    id = "table5"
    title = "human evaluation of graph-to-text output"

    @property
    def source(self) -> str:
        return published().source(self.id)

    def required_datasets(self, options: Options) -> list[Dataset]:
        """Return the dataset of the judged texts; empty if there are judgements."""
        return [] if options.judgements else GRAPH_TABLE.required_datasets(options)[:1]

    def run_sets(self, options: Options) -> list[RunSet]:
        every_method = replace(options, methods=())
        return [
            GRAPH_TABLE.runs_on(dataset, every_method)[name]
            for dataset in self.required_datasets(options)
            for name in SYSTEMS
        ]

    def report(self, options: Options, log: Log) -> Report:
        if options.judgements:
            prepared, mismatch = _data_of_judgements(options)
            return self._count(options.judgements, prepared, mismatch)
        (dataset,) = self.required_datasets(options)
        data = inspect_dataset(dataset, options)
        page, key = self._write_page(dataset, options)
        if not options.toy:
            findings = [judge(claim, None, None, NO_JUDGES) for claim in published().claims(self.id)]
            return Report(self.id, self.title, self.source, [data], findings=findings, files=[page, key])
        files = _scripted_answers(key, [key.with_name(f"{name}.jsonl") for name in SYSTEMS])
        return self._count([key, *files], [data], Mismatch("toy data, and the judges are a script"))

    def _write_page(self, dataset: Dataset, options: Options) -> tuple[Path, Path]:
        """Write the page for judges and its key."""
        runs = first_runs(dataset, replace(options, methods=()), SYSTEMS)
        task, texts = load_texts(runs)
        folder = options.out / "judge"
        first, second = (write_judge_file(folder / f"{name}.jsonl", task, texts[name]) for name in SYSTEMS)
        made = make(first, second, folder / "judge.html", count=min(ITEMS, len(texts[SYSTEMS[0]])))
        return made.page, made.key

    def _count(self, files: Sequence[Path], prepared: Sequence[PreparedData], mismatch: Mismatch | None) -> Report:
        """Count the answers of the judges."""
        key, answers = split_files(files)
        counts = tally(key, read_all(answers, key))
        rows = []
        for name, verdict in counts.verdicts.items():
            numbers = {}
            for kind in ("win", "lose", "tie"):
                share = getattr(verdict, kind) if verdict else None
                interval = None if share is None or share.low is None else (100 * share.low, 100 * share.high)
                printed = published().value(self.id, "agenda", name, kind)
                numbers[f"{kind} (%)"] = Number(printed, [100 * share.value] if share else [], interval)
            rows.append(Row(f"{counts.items} items", name, name.capitalize(), len(counts.judges), numbers))
        findings = [_judge_preference(claim, counts, mismatch) for claim in published().claims(self.id)]
        texts = [as_markdown(counts)]
        return Report(self.id, self.title, self.source, prepared, rows, findings, texts, counted="judges")


def split_files(files: Sequence[Path]) -> tuple[Key, list[Path]]:
    """Separate the key from the files of the judges, by the format each file declares.

    Raises:
        DataError: there is no key, or more than one.
    """
    keys = [path for path in files if read_json(path).get("format") == KEY]
    if len(keys) != 1:
        raise DataError(
            f"--judgements: expected one key among {len(files)} files, got {len(keys)}; add the key of the judges' page"
        )
    return read_key(keys[0]), [path for path in files if path != keys[0]]


def _data_of_judgements(options: Options) -> tuple[list[PreparedData], Mismatch | None]:
    """Return the prepared data of the judged texts, and why they are not the paper's data (None if they are).

    A key does not name its dataset, so a claim is only tested if the paper's data are prepared.
    """
    dataset = DATASETS[GRAPH_TABLE.paper_datasets[0]]
    if not (dataset.folder(options.data) / MANIFEST).is_file():
        return [], Mismatch(f"the dataset of the texts is unknown: no {dataset.name} in {options.data}")
    data = inspect_dataset(dataset, options)
    return [data], data.mismatch


def _judge_preference(claim: Claim, counts: Tally, mismatch: Mismatch | None) -> Finding:
    verdict = counts.verdicts[claim.metric]
    if verdict is None or verdict.lead.low is None or verdict.lead.high is None:
        return judge(claim, None, None, "no answers, or only one item")
    lead = [100 * share for share in (verdict.lead.value, verdict.lead.low, verdict.lead.high)]
    judges, items = len(counts.judges), counts.items
    comparison = Comparison(lead[0], lead[1], lead[2], verdict.p_value, "items and judges", judges, items)
    return judge(claim, comparison, mismatch)


def _scripted_answers(key_path: Path, texts: Sequence[Path]) -> list[Path]:
    """Write answers of scripted judges, who prefer the text that shares more words with the gold text."""
    key, (first, second) = read_key(key_path), [read_texts(path) for path in texts]
    files = []
    for number, margin in enumerate(TIE_MARGINS, 1):
        answers = []
        for item, (name, side) in enumerate(zip(key.ids, key.sides, strict=True), 1):
            lead = _overlap_with_gold(first[name]) - _overlap_with_gold(second[name])
            other_side = {"left": "right", "right": "left"}[side]
            choice = "tie" if abs(lead) <= margin else side if lead > 0 else other_side
            answers.append({"item": item, **dict.fromkeys(CRITERIA, choice)})
        header = {"format": FORMAT, "version": 1, "page": key.page, "seal": key.seal, "judge": f"script {number}"}
        files.append(key_path.with_name(f"answers-{number}.json"))
        write_text(files[-1], json.dumps({**header, "answers": answers}, indent=1) + "\n")
    return files


def _overlap_with_gold(text: Text) -> float:
    """Compute the number of words shared with the gold text / geometric mean of both numbers of words."""
    words, gold = set(text.text.split()), set((text.gold or "").split())
    return len(words & gold) / math.sqrt(max(1, len(words)) * max(1, len(gold)))

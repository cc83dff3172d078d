"""Table 5: what people say. Counts the judges' files; without any it writes the page to send them."""

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
from repulsive.lab.paper.datasets import DATASETS, DataSet, Found, look
from repulsive.lab.paper.outcome import Number, Report, Row
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.running import Options, RunSet, Tell
from repulsive.lab.paper.texts import TABLE, first_runs, open_texts, write_lines
from repulsive.lab.paper.verdicts import Finding, judge
from repulsive.lab.text.folders import MANIFEST
from repulsive.metrics.compare import Comparison

SYSTEMS = ("rma", "gw")  # the first one's wins are counted
COUNT = 50
NO_JUDGES = "nobody has judged yet: send the page to judges, then give their files with --judgements"
SCRIPTED = (0.0, 0.1, 0.3)  # of the scripted judges: how much nearer to the gold text one must be to win


class JudgedTable:
    """The table; an artefact as those of `comparison`."""

    id = "table5"
    title = "human judgement of texts from graphs"

    @property
    def source(self) -> str:
        return published().source(self.id)

    def needs(self, options: Options) -> list[DataSet]:
        """Nothing where judges have answered."""
        return [] if options.judgements else TABLE.needs(options)[:1]

    def rows(self, options: Options) -> list[RunSet]:
        every = replace(options, methods=())
        return [TABLE.on(data, every)[name] for data in self.needs(options) for name in SYSTEMS]

    def report(self, options: Options, tell: Tell) -> Report:
        if options.judgements:
            found, other = _data_of_judges(options)
            return self._counted(options.judgements, found, other)
        (data,) = self.needs(options)
        seen = look(data, options.data, options.toy, options.changes)
        page, key = self._page(data, options)
        if not options.toy:
            findings = [judge(claim, None, "", NO_JUDGES) for claim in published().claims(self.id)]
            return Report(self.id, self.title, self.source, [seen], findings=findings, files=[page, key])
        files = _scripted(key, [key.with_name(f"{name}.jsonl") for name in SYSTEMS])
        return self._counted([key, *files], [seen], "toy data, and the judges are a script")

    def _page(self, data: DataSet, options: Options) -> tuple[Path, Path]:
        """The page for judges and its key."""
        runs = first_runs(data, replace(options, methods=()), SYSTEMS)
        task, written = open_texts(runs)
        place = options.out / "judge"
        first, second = (write_lines(place / f"{name}.jsonl", task, written[name]) for name in SYSTEMS)
        made = make(first, second, place / "judge.html", count=min(COUNT, len(written[SYSTEMS[0]])))
        return made.page, made.key

    def _counted(self, files: Sequence[Path], data: Sequence[Found], other: str) -> Report:
        key, answers = sorted_files(files)
        found = tally(key, read_all(answers, key))
        rows = []
        for name, verdict in found.verdicts.items():
            numbers = {}
            for kind in ("win", "lose", "tie"):
                share = getattr(verdict, kind) if verdict else None
                ends = None if share is None or share.low is None else (100 * share.low, 100 * share.high)
                printed = published().value(self.id, "agenda", name, kind)
                numbers[f"{kind} (%)"] = Number(printed, [100 * share.value] if share else [], ends)
            rows.append(Row(f"{found.items} items", name, name.capitalize(), len(found.judges), numbers))
        findings = [_finding(claim, found, other) for claim in published().claims(self.id)]
        return Report(self.id, self.title, self.source, data, rows, findings, [as_markdown(found)], units="judges")


def sorted_files(files: Sequence[Path]) -> tuple[Key, list[Path]]:
    """The key, and the files of the judges, told apart by what they say they are.

    Raises:
        DataError: there is no key, or more than one.
    """
    keys = [path for path in files if read_json(path).get("format") == KEY]
    if len(keys) != 1:
        raise DataError(f"--judgements: {len(keys)} keys among {len(files)} files; give one, that of the judges' page")
    return read_key(keys[0]), [path for path in files if path != keys[0]]


def _data_of_judges(options: Options) -> tuple[list[Found], str]:
    """What the judged texts are of: a key does not say it, so the paper's data have to be there to be believed."""
    data = DATASETS[TABLE.data[0]]
    if not (data.folder(options.data) / MANIFEST).is_file():
        return [], f"nothing here says what the texts are about: no {data.name} in {options.data}"
    found = look(data, options.data, options.toy, options.changes)
    return [found], found.other


def _finding(claim: Claim, found: Tally, other: str) -> Finding:
    verdict = found.verdicts[claim.metric]
    if verdict is None or verdict.lead.low is None or verdict.lead.high is None:
        return judge(claim, None, "", "nobody answered, or one item only")
    lead = [100 * share for share in (verdict.lead.value, verdict.lead.low, verdict.lead.high)]
    seen = Comparison(lead[0], lead[1], lead[2], verdict.p_value, "items and judges", len(found.judges), found.items)
    return judge(claim, seen, other)


def _scripted(key_path: Path, texts: Sequence[Path]) -> list[Path]:
    """Answers of judges that are a script: who shares more words with the gold text wins."""
    key, (first, second) = read_key(key_path), [read_texts(path) for path in texts]
    files = []
    for number, margin in enumerate(SCRIPTED, 1):
        answers = []
        for item, (name, side) in enumerate(zip(key.ids, key.sides, strict=True), 1):
            lead = _near(first[name]) - _near(second[name])
            other = {"left": "right", "right": "left"}[side]
            choice = "tie" if abs(lead) <= margin else side if lead > 0 else other
            answers.append({"item": item, **dict.fromkeys(CRITERIA, choice)})
        told = {"format": FORMAT, "version": 1, "page": key.page, "seal": key.seal, "judge": f"script {number}"}
        files.append(key_path.with_name(f"answers-{number}.json"))
        write_text(files[-1], json.dumps({**told, "answers": answers}, indent=1) + "\n")
    return files


def _near(text: Text) -> float:
    """Shared words over the geometric mean of how many there are."""
    words, gold = set(text.text.split()), set((text.gold or "").split())
    return len(words & gold) / math.sqrt(max(1, len(words)) * max(1, len(gold)))

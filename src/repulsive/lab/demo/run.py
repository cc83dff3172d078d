"""Run the demo: train all runs, compare them, and write the page.

    findings = run_demo(Path("demo"), Settings(), range(5), print_text=print)

text.txt        the text
runs/           all runs, see `runs`
summary.json    the numbers of the page
report.html     the page
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import RunError
from repulsive.lab.demo.example import SENTENCES, Chosen, choose, read
from repulsive.lab.demo.findings import MEASURES, Findings
from repulsive.lab.demo.page import repel_line, write_page
from repulsive.lab.demo.runs import SUMMARY, jobs_of, train_all
from repulsive.lab.demo.settings import ARMS, PLAIN, Settings
from repulsive.lab.demo.terminal import Lines, LiveTable
from repulsive.lab.demo.text import documentation, sentences
from repulsive.lab.engine.files import write_json

PAGE = "report.html"
INTRODUCTION = (
    "Three small language models per seed learn the same text: plain, with heads that\n"
    "repel each other, and with a regularizer that penalises similar heads.\n"
)


def run_demo(
    out: Path,
    settings: Settings,
    seeds: Sequence[int],
    print_text: Callable[[str], None],
    processes: int = 0,
    text: str | None = None,
    *,
    live: bool = True,
) -> Findings:
    """Train the runs that are not finished, print what was found, and write the page.

    Args:
        out: output folder.
        settings: sizes of the model and of the training.
        seeds: random seeds; each has a run of every kind.
        print_text: prints text.
        processes: parallel runs; 0: one per core.
        text: the text to learn, one paragraph per line; None: Python's documentation.
        live: at a terminal, show a table on stdout that changes while the runs train.

    Returns:
        The results of all runs.

    Raises:
        DataError: there is too little text.
        RunError: the folder cannot be written, or a run failed.
        Stopped: Ctrl-C was received; finished runs are kept.
    """
    importlib.import_module("numpy")  # a missing package is better noticed now than after training
    importlib.import_module("safetensors.torch")
    started = time.monotonic()
    _make_folder(out)
    source = "Python's documentation" if text is None else "text"
    text = documentation() if text is None else text
    examples = sentences(text, SENTENCES)
    jobs = jobs_of(settings, seeds, out, text)
    print_text(INTRODUCTION)
    view = LiveTable(settings, seeds) if live and sys.stdout.isatty() else Lines(len(jobs), print_text)
    with view:
        findings = Findings(train_all(jobs, view, processes))
    chosen = choose(findings, examples)
    spent = sum(result.seconds for result in findings.results.values())
    facts = [
        ("Text", f"{len(text):,} bytes of {source}, one block in ten held out; SHA-256 {jobs[0].text_sha[:12]}"),
        ("Time", f"{spent:.0f} s of CPU time for {len(jobs)} runs, one core each"),
    ]
    page = write_page(out / PAGE, findings, chosen, read(findings, chosen), facts)
    write_json(out / SUMMARY, summary(findings, chosen))
    print_text(f"\n{findings.as_text()}\n\npage: {page} ({time.monotonic() - started:.0f} s)")
    print_text(f"your turn: {repel_line(settings.rule)}, or repulsive inspect\n{findings.last_line()}")
    return findings


def summary(findings: Findings, chosen: Chosen) -> dict[str, Any]:
    """Collect the numbers of the page for JSON."""
    measures: dict[str, Any] = {}
    for measure in MEASURES:
        measures[measure.key] = {
            arm: {
                "seeds": findings.values(arm, measure),
                "difference": None if arm == PLAIN else findings.difference(arm, measure).mean,
                "interval": None if arm == PLAIN else findings.difference(arm, measure).interval,
            }
            for arm in ARMS
        }
    return {
        "seeds": findings.seeds,
        "measures": measures,
        "sentence": chosen.sentence,
        "shown_seed": chosen.seed,
    }


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: cannot be created ({error.strerror}); choose another folder") from None

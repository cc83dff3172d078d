"""`repulsive report`: finished runs become one page, and figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from repulsive.data.prepared import Part, Prepared
from repulsive.diagnostics.report import Chart, Content, Example, Panel, write_report
from repulsive.diagnostics.report.figures import learning_curve
from repulsive.diagnostics.report.paper import check_matplotlib, write_figures
from repulsive.errors import ConfigError, RunError
from repulsive.recipes import from_tables, make_task, panels
from repulsive.recipes.classification import ClassificationTask
from repulsive.recipes.foreign import open_foreign, unknown_share
from repulsive.recipes.gather import Method, facts, open_methods, open_rows, part_name
from repulsive.recipes.head_counts import head_counts
from repulsive.recipes.measure import Measured, measure_classifier, measure_model
from repulsive.recipes.readings import examples, spread
from repulsive.recipes.results import results
from repulsive.recipes.score import load_run
from repulsive.training.processes import chosen_device
from repulsive.training.task import Task

CURVES = {  # name -> kind and key of a line of metrics.jsonl, and the figure's file
    "training loss, penalty included": ("train", "loss", "train-loss"),
    "dev accuracy": ("dev", "accuracy", "dev-accuracy"),
    "dev NLL": ("dev", "nll", "dev-nll"),
    "overlap of heads, dev": ("dev", "overlap", "overlap"),
    "distance between heads' weights": ("heads", "distance", "distance"),
    "repulsion over drive": ("heads", "ratio", "ratio"),
}
SHOWN = 8  # examples on the page
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What a report looks at.

    Args:
        part: "test" or "dev".
        most: items on which heads are taken away.
        foreign: another prepared folder, for the entropy of predictions on foreign texts.
        heads: show the error against the number of heads, and nothing that needs the weights.
        device: "cpu", "cuda" or None for what is there.
        title: of the page.
    """

    part: str = "test"
    most: int = 2000
    foreign: Path | None = None
    heads: bool = False
    device: str | None = None
    title: str = ""

    def __post_init__(self) -> None:
        if self.heads and self.foreign is not None:
            raise ConfigError("give --heads or --foreign, not both: two reports")


def write(
    folders: Sequence[Path], out: Path, figures: Path | None, options: Options, tell: Tell = lambda line: None
) -> list[Path]:
    """Measure finished runs, write their page and, where a folder is given, its figures.

    Args:
        folders: of runs, each with one or more seeds; the first is what the others are compared with.
        out: the HTML file.
        figures: folder for SVG and PDF files; None: none.
        options: what to look at.
        tell: told what is going on, a line at a time.

    Returns:
        The page, and the folder of figures.

    Raises:
        RunError: a folder holds no finished run, or runs of other data than the first; or nothing can be written.
        DataError: the data are not there, or the foreign data do not fit.
        ConfigError: an option that cannot be, or Matplotlib is missing.
    """
    if figures is not None:
        check_matplotlib()  # before the long part, as is all that can be
    _check_place(out)
    content = head_counts(folders, options.part, options.title) if options.heads else gather(folders, options, tell)
    try:
        write_report(out, content)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    if figures is None:
        return [out]
    write_figures(figures, content)
    return [out, figures]


def gather(folders: Sequence[Path], options: Options, tell: Tell = lambda line: None) -> Content:
    """What the page of some runs shows, as data; arguments and errors as in `write`."""
    methods = open_methods(folders)
    rows = open_rows(methods, options.part)
    device = chosen_device(options.device)
    other = None if options.foreign is None else _foreign(methods[0], options.foreign, options.part, device)
    task: Task | None = None
    models: dict[str, nn.Module] = {}
    found: dict[str, dict[int, Measured]] = {}
    for method in methods:
        found[method.label] = {}
        for seed, run in method.runs.items():
            tell(f"{run.path}: measuring heads")
            task, model = load_run(run, device)
            if not isinstance(task, ClassificationTask):
                found[method.label][seed] = measure_model(model, getattr(task, "look", None), _each_tenth(tell))
                continue
            found[method.label][seed] = measure_classifier(
                model, task.parts[options.part], most=options.most, seed=seed, foreign=other
            )
            if run is method.first:
                models[method.label] = model.cpu()
    assert task is not None  # there is a method, and it has a run
    readings: list[Example] = []
    if isinstance(task, ClassificationTask):
        part = task.data.parts[options.part]
        readings = examples(task.data, options.part, spread(part, SHOWN), models)
    data = _data_of(task)
    return Content(
        title=options.title or (f"Heads on {data.task}" if data else "Heads"),
        lead=_lead(methods, options.part),
        facts=_facts(methods, task),
        table=results(rows, _caption(methods, options.part)),
        charts=curves(methods),
        examples=readings,
        panels=_panels(methods, found, options, other),
    )


def curves(methods: Sequence[Method]) -> list[Chart]:
    """Learning curves of what the runs logged; a quantity that no run has is left out."""
    charts = []
    for name, (kind, key, file) in CURVES.items():
        seen = {method.label: points for method in methods if (points := method.curves(kind, key))}
        if seen:
            charts.append(learning_curve(name, seen, file))
    return charts


def _foreign(method: Method, folder: Path, part: str, device: torch.device) -> Part:
    task = make_task(from_tables(method.tables(), str(method.first.path)))
    if not isinstance(task, ClassificationTask):
        raise ConfigError(f"--foreign compares how sure classifiers are; {method.folder} is of another task")
    return open_foreign(folder, task.data, part).to(device)


def _check_place(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    if out.is_dir():
        raise RunError(f"{out}: is a folder; --out names the HTML file")


def _panels(
    methods: Sequence[Method], found: Mapping[str, Mapping[int, Measured]], options: Options, other: Part | None
) -> list[Panel]:
    shown = [panels.alike(found)]
    every = [run for runs in found.values() for run in runs.values()]
    classifiers = all(run.bootstrap is not None for run in every)
    if all(run.change is not None for run in every):
        shown.append(panels.redundancy(found, part_name(options.part if classifiers else "dev")))
    if not classifiers:
        return shown
    answers: dict[str, dict[int, dict[str, Tensor]]] = {
        method.label: {seed: run.items(options.part) for seed, run in method.runs.items()} for method in methods
    }
    shown.append(panels.calibration(found, answers))
    if other is not None and options.foreign is not None:
        shown.append(panels.foreign(found, answers, options.foreign.name, unknown_share(other)))
    return shown


def _each_tenth(tell: Tell) -> Callable[[int, int], None]:
    def heads(done: int, of: int) -> None:
        if done == of or done % max(1, of // 10) == 0:
            tell(f"took away {done} of {of} heads")

    return heads


def _lead(methods: Sequence[Method], part: str) -> str:
    names = ", ".join(method.label for method in methods)
    seeds = sorted({len(method.runs) for method in methods})
    many = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    left = [f"seed {seed} of {method.label}" for method in methods for seed in method.unfinished]
    missing = f" Not ended, and left out: {', '.join(left)}." if left else ""
    return f"{names}: {many} seed{'' if many == '1' else 's'} each, on the {part_name(part)}.{missing}"


def _caption(methods: Sequence[Method], part: str) -> str:
    spread_over = "mean ± standard deviation over seeds" if any(len(m.runs) > 1 for m in methods) else "one seed"
    return f"{part_name(part).capitalize()}, {spread_over}; weights chosen on the development set."


def _data_of(task: Task) -> Prepared | None:
    """What a task was trained on, where it is a prepared folder."""
    data = getattr(task, "data", None)
    return data if isinstance(data, Prepared) else None


def _facts(methods: Sequence[Method], task: Task) -> list[tuple[str, str]]:
    own: list[tuple[str, str]] = []
    if data := _data_of(task):
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in data.parts.items())
        own = [("data", f"{data.task}: {sizes}"), ("words known", f"{len(data.vocabulary):,}")]
    return [*own, *facts(methods)]

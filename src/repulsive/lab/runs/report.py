"""`repulsive report`: finished runs become one page, and figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.task import Task
from repulsive.lab.runs import panels
from repulsive.lab.runs.head_counts import head_counts
from repulsive.lab.runs.load import Method, facts, open_methods, open_rows, part_name
from repulsive.lab.runs.results import results
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.foreign import open_foreign, unknown_share
from repulsive.lab.systems.classification.measure import Measured, measure_classifier, measure_model
from repulsive.lab.systems.classification.readings import examples, spread
from repulsive.lab.systems.classification.task import ClassificationTask
from repulsive.lab.systems.registry import from_tables, make_task
from repulsive.lab.systems.translation.measure import layered_examples, measure_translator
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.pages import Chart, Content, Example, Layered, Panel, write_report
from repulsive.pages.figures import learning_curve
from repulsive.pages.paper import check_matplotlib, write_figures

CURVES = {  # name -> kind and key of a line of metrics.jsonl, and the figure's file
    "training loss, penalty included": ("train", "loss", "train-loss"),
    "dev accuracy": ("dev", "accuracy", "dev-accuracy"),
    "dev NLL": ("dev", "nll", "dev-nll"),
    "Dist, dev": ("dev", "dist", "dist"),
    "overlap of heads, dev": ("dev", "overlap", "overlap"),
    "distance between heads' weights": ("heads", "distance", "distance"),
    "repulsion over drive": ("heads", "ratio", "ratio"),
}
LAYER = "distance/"  # begins the name of what is logged of a layer
SHOWN = 8  # examples on the page
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What a report looks at.

    Args:
        part: "test", "dev" or a further test set.
        most: items on which heads are taken away.
        foreign: another prepared folder, for the entropy of predictions on foreign texts.
        heads: show the error against the number of heads, and nothing that needs the weights.
        bleu: of translators, take heads away by BLEU of greedy translations, not by the accuracy of pieces.
        device: "cpu", "cuda" or None for what is there.
        title: of the page.
    """

    part: str = "test"
    most: int = 2000
    foreign: Path | None = None
    heads: bool = False
    bleu: bool = False
    device: str | None = None
    title: str = ""

    def __post_init__(self) -> None:
        if self.heads and (self.foreign is not None or self.bleu):
            other = "--bleu" if self.foreign is None else "--foreign"
            raise ConfigError(f"give --heads or {other}, not both: two reports")


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
    if options.bleu and any(method.tables().get("task") != "translation" for method in methods):
        raise ConfigError("--bleu: these runs do not translate; leave it out")
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
            found[method.label][seed] = _measure(task, model, options, seed, other, _each_tenth(tell))
            if run is method.first:
                models[method.label] = model.cpu()
    assert task is not None  # there is a method, and it has a run
    readings, layered = _examples(task, options.part, models)
    data = _data_of(task)
    return Content(
        title=options.title or (f"Heads on {data.task}" if data else "Heads"),
        lead=_lead(methods, options.part),
        facts=_facts(methods, task),
        table=results(rows, _caption(methods, options.part)),
        charts=curves(methods),
        examples=readings,
        panels=[*by_layer(methods), *_panels(methods, found, options, other), *_left_out(task)],
        layered=layered,
    )


def _measure(
    task: Task, model: nn.Module, options: Options, seed: int, other: Part | None, tell: Callable[[int, int], None]
) -> Measured:
    if isinstance(task, ClassificationTask):
        part = task.parts[options.part]
        return measure_classifier(model, part, most=options.most, seed=seed, foreign=other)
    if isinstance(task, TranslationTask):
        return measure_translator(model, task, options.part, most=options.most, bleu=options.bleu, tell=tell)
    return measure_model(model, getattr(task, "look", None), tell)


def _examples(task: Task, part: str, models: Mapping[str, nn.Module]) -> tuple[list[Example], list[Layered]]:
    """What the attention explorer shows, of one layer or of several."""
    if isinstance(task, ClassificationTask):
        return examples(task.data, part, spread(task.data.parts[part], SHOWN), models), []
    return [], layered_examples(task, part, models, SHOWN) if isinstance(task, TranslationTask) else []


def _left_out(task: Task) -> list[Panel]:
    """What a page on this task does not have."""
    if isinstance(task, ClassificationTask):
        return []
    told = "Reliability, entropy and the head bootstrap: they are measured on classifiers, which choose a class."
    return [Panel("Not in this report", [told])]


def curves(methods: Sequence[Method]) -> list[Chart]:
    """Learning curves of what the runs logged; a quantity that no run has is left out."""
    charts = []
    for name, (kind, key, file) in CURVES.items():
        seen = {method.label: points for method in methods if (points := method.curves(kind, key))}
        if seen:
            charts.append(learning_curve(name, seen, file))
    return charts


def by_layer(methods: Sequence[Method]) -> list[Panel]:
    """How far apart the heads of each layer were in training; nothing for models of one layer."""
    names = [name for method in methods for run in method.runs.values() for name in run.keys("heads")]
    charts = []
    for name in dict.fromkeys(name for name in names if name.startswith(LAYER)):
        layer = name.removeprefix(LAYER)
        seen = {method.label: points for method in methods if (points := method.curves("heads", name))}
        charts.append(learning_curve(layer, seen, f"distance-{layer.replace(' ', '-')}"))
    lead = ["The mean distance between the weights of two heads, over the projections of a layer."]
    return [Panel("Layers in training", lead, charts=charts)] if charts else []


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
        shown.append(panels.redundancy(found, part_name(options.part)))
    if all(run.pruned is not None for run in every):
        shown.append(panels.pruning(found))
    if not classifiers:
        return shown
    answers: dict[str, dict[int, dict[str, Tensor]]] = {
        method.label: {seed: run.items(options.part) for seed, run in method.runs.items()} for method in methods
    }
    shown.append(panels.calibration(found, answers))
    foreign = None if options.foreign is None or other is None else (options.foreign.name, unknown_share(other))
    shown.append(panels.unsure(found, answers, foreign))
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

"""`repulsive report`: write one page, and figures, about finished runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.reporting import Measured, Progress, ReportOptions
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Task
from repulsive.lab.runs import panels
from repulsive.lab.runs.head_counts import head_counts
from repulsive.lab.runs.load import Method, facts, open_methods, open_rows, part_name
from repulsive.lab.runs.results import results
from repulsive.lab.runs.score import data_folder, load_run, load_trained, open_trained
from repulsive.lab.systems.classification.foreign import unknown_share
from repulsive.pages import Chart, Content, Panel, write_report
from repulsive.pages.charts import learning_curve
from repulsive.pages.figures.write import check_matplotlib, write_figures
from repulsive.safety.folders import check_creatable

CURVES = {  # name -> kind and key of a line of metrics.jsonl, and the figure's file
    "training loss, penalty included": ("train", "loss", "train-loss"),
    "dev accuracy": ("dev", "accuracy", "dev-accuracy"),
    "dev NLL": ("dev", "nll", "dev-nll"),
    "Dist, dev": ("dev", "dist", "dist"),
    "overlap of heads, dev": ("dev", "overlap", "overlap"),
    "distance between heads' weights": ("heads", "distance", "distance"),
    "repulsion over drive": ("heads", "ratio", "ratio"),
}
LAYER = "distance/"  # prefix of quantities that are logged per layer
NO_CALIBRATION = "Reliability, entropy and the head bootstrap: they are measured on classifiers only."
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of a report.

    Args:
        part: data split: "test", "dev" or a further test set.
        most: number of items to ablate heads on.
        foreign: another prepared folder, for the entropy of predictions on foreign texts.
        heads: show the error against the number of heads instead, which does not need the weights.
        bleu: measure ablations of translators by BLEU of greedy translations instead of token accuracy.
        device: "cpu", "cuda" or None for the default.
        title: title of the page.
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
    """Measure finished runs, and write their page and figures.

    Args:
        folders: folders of runs, each with one or more seeds; the first is the baseline.
        out: the HTML file.
        figures: folder for SVG and PDF files; None: no figures.
        options: what to show.
        tell: function that is called with progress messages.

    Returns:
        The page, and the folder of figures.

    Raises:
        RunError: a folder holds no finished run, or runs of other data than the first; or a file cannot be written.
        DataError: the data are damaged, or the foreign data do not fit.
        ConfigError: an option does not apply to these runs, or Matplotlib is missing.
    """
    if figures is not None:
        check_matplotlib()  # fail before the measurements, which take long
    _check_writable(out)
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
    """Collect the content of a page; arguments and errors as in `write`."""
    methods = open_methods(folders)
    device = chosen_device(options.device)
    foreign = _open_foreign(methods[0], options, device)
    rows = open_rows(methods, options.part)
    task: Task | None = None
    models: dict[str, nn.Module] = {}
    measured: dict[str, dict[int, Measured]] = {}
    for method in methods:
        measured[method.label] = {}
        for seed, run in method.runs.items():
            tell(f"{run.path}: measuring heads")
            task, model = _load(run, device)
            wanted = ReportOptions(options.part, options.most, seed, foreign, options.bleu, _every_tenth(tell))
            measured[method.label][seed] = task.measure_heads(model, wanted)
            if run is method.first:
                models[method.label] = model.cpu()
    assert task is not None  # every method has a run
    examples = task.examples(options.part, models)
    return Content(
        title=options.title or (f"Heads on {task.dataset}" if task.dataset else "Heads"),
        lead=_lead(methods, options.part),
        facts=[*task.facts(), *facts(methods)],
        table=results(rows, _caption(methods, options.part)),
        charts=curves(methods),
        examples=examples.single,
        panels=[*by_layer(methods), *_panels(task, methods, measured, options, foreign), *_left_out(task, methods[0])],
        layered=examples.layered,
    )


def curves(methods: Sequence[Method]) -> list[Chart]:
    """Make the learning curves of the logged quantities; quantities that no run has are left out."""
    charts = []
    for name, (kind, key, file) in CURVES.items():
        points = {method.label: curve for method in methods if (curve := method.curves(kind, key))}
        if points:
            charts.append(learning_curve(name, points, file))
    return charts


def by_layer(methods: Sequence[Method]) -> list[Panel]:
    """Plot the distance between the heads of each layer during training; empty for models with one layer."""
    names = [name for method in methods for run in method.runs.values() for name in run.keys("heads")]
    charts = []
    for name in dict.fromkeys(name for name in names if name.startswith(LAYER)):
        layer = name.removeprefix(LAYER)
        points = {method.label: curve for method in methods if (curve := method.curves("heads", name))}
        charts.append(learning_curve(layer, points, f"distance-{layer.replace(' ', '-')}"))
    lead = ["The mean distance between the weights of two heads, over the projections of a layer."]
    return [Panel("Layers in training", lead, charts=charts)] if charts else []


def _load(run: RunFolder, device: torch.device) -> tuple[Task, nn.Module]:
    """Load the task and model of a run with its data or, if the data are gone, with the assets in its folder."""
    folder = data_folder(run)
    if folder is None or folder.exists() or not run.assets():
        return load_run(run, device)
    return load_trained(run, device)


def _open_foreign(method: Method, options: Options, device: torch.device) -> Any:
    """Open foreign data for the measurements, and check early that the options apply to the runs."""
    if options.foreign is None and not options.bleu:
        return None
    task = open_trained(method.first)
    if options.bleu and not task.has_bleu:
        raise ConfigError("--bleu: these runs do not translate; leave it out")
    if options.foreign is None:
        return None
    task.to(device)
    return task.open_foreign(options.foreign, options.part)


def _check_writable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_creatable(out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    if out.is_dir():
        raise RunError(f"{out}: is a folder; --out names the HTML file")


def _panels(
    task: Task,
    methods: Sequence[Method],
    measured: Mapping[str, Mapping[int, Measured]],
    options: Options,
    foreign: Any,
) -> list[Panel]:
    shown = [panels.similarity(measured)]
    runs = [run for seeds in measured.values() for run in seeds.values()]
    if all(run.change is not None for run in runs):
        shown.append(panels.redundancy(measured, part_name(options.part)))
    if all(run.pruned is not None for run in runs):
        shown.append(panels.pruning(measured))
    if not task.has_calibration:
        return shown
    answers: dict[str, dict[int, dict[str, Tensor]]] = {
        method.label: {seed: run.items(options.part) for seed, run in method.runs.items()} for method in methods
    }
    shown.append(panels.calibration(measured, answers))
    has_foreign = all(run.foreign is not None for run in runs)
    other = (options.foreign.name, unknown_share(foreign)) if options.foreign and has_foreign else None
    shown.append(panels.prediction_entropy(measured, answers, other))
    return shown


def _left_out(task: Task, method: Method) -> list[Panel]:
    """List the measurements that the page does not show, and why."""
    notes = [] if task.has_calibration else [NO_CALIBRATION]
    if not task.has_data:
        notes.append(
            "What is measured on the data, such as the effect of removing a head: the prepared data are not at "
            f"{data_folder(method.first)}. Results and curves are those that the runs stored."
        )
    return [Panel("Not in this report", notes)] if notes else []


def _every_tenth(tell: Tell) -> Progress:
    def progress(done: int, of: int) -> None:
        if done == of or done % max(1, of // 10) == 0:
            tell(f"ablated {done} of {of} heads")

    return progress


def _lead(methods: Sequence[Method], part: str) -> str:
    names = ", ".join(method.label for method in methods)
    seeds = sorted({len(method.runs) for method in methods})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    unfinished = [f"seed {seed} of {method.label}" for method in methods for seed in method.unfinished]
    missing = f" Not finished, and left out: {', '.join(unfinished)}." if unfinished else ""
    return f"{names}: {count} seed{'' if count == '1' else 's'} each, on the {part_name(part)}.{missing}"


def _caption(methods: Sequence[Method], part: str) -> str:
    spread_over = "mean ± standard deviation over seeds" if any(len(m.runs) > 1 for m in methods) else "one seed"
    return f"{part_name(part).capitalize()}, {spread_over}; weights chosen on the development set."

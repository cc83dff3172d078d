"""Tables of the study of sampling, for results/sampling/gaussians.md and docs/noise.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from studies.sampling.chains import METHODS
from studies.sampling.gaussians import SHAPES, Target
from studies.sampling.theory import known_variances, second_moment_excess

from repulsive.safety.markdown import format_table

STEPS = (0.001, 0.01, 0.05)  # step times curvature
PLACES = (0.01, 0.05)  # steps at which all settings of noise_in are compared
NOISE = 3.0  # standard deviation of gradient noise over that of gradients
PLAIN = ("SGD", "SGD, momentum 0.9", "Adam", "AdamW", "RMSprop")  # optimizers compared for all settings of noise_in
TOLERANCE = 0.05

Runs = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A measured cell with its known errors.

    Args:
        optimizer: label of the method.
        place: `noise_in`.
        target: what was sampled.
        row: the stored numbers.
    """

    optimizer: str
    place: str
    target: Target
    row: dict[str, Any]

    @property
    def known(self) -> tuple[float, float]:
        """Variances that finite steps and gradient noise cause, along the stiff and the slow direction."""
        return known_variances(_METHODS[self.optimizer], self.target)

    @property
    def corrected(self) -> tuple[float, ...]:
        """Variances divided by the known ones; one number for one dimension."""
        both = self.row["stiff"] / self.known[0], self.row["slow"] / self.known[1]
        return both[: len(SHAPES[self.target.shape])]

    @property
    def is_right(self) -> bool:
        """Whether variances and mean are within the tolerance."""
        return all(abs(x - 1) <= TOLERANCE for x in (*self.corrected, 1 + self.row["mean"]))

    def show(self) -> str:
        """The corrected variances; bold if a variance or the mean is outside of the tolerance."""
        text = " / ".join(f"{x:.2f}" for x in self.corrected)
        return text if self.is_right else f"**{text}**"


_METHODS = {method.label: method for method in METHODS}


def cells(runs: Runs) -> Iterator[Cell]:
    """Yield all cells of the stored runs."""
    for run in runs:
        for row in run["cells"]:
            yield Cell(run["optimizer"], run["noise_in"], Target(row["shape"], row["step"], row["noise"]), row)


def places_table(runs: Runs) -> str:
    """Format the variances of N(0, 1) with full gradients, by setting of `noise_in`."""
    full = {(cell.optimizer, cell.place, cell.target): cell.row["stiff"] for cell in cells(runs)}
    columns = [(place, step) for place in ("gradient", "parameter", "optimizer") for step in PLACES]
    rows = []
    for label in PLAIN:
        values = [full.get((label, place, Target("N(0, 1)", step))) for place, step in columns]
        rows.append([label, *("-" if value is None else f"{value:.2f}" for value in values)])
    return format_table(["optimizer", *(f"{place}, {step:g}" for place, step in columns)], rows)


def corrected_table(runs: Runs, noise: float, title: str) -> str:
    """Format the corrected variances with noise in the optimizer's step."""
    shown = {(cell.optimizer, cell.target): cell.show() for cell in cells(runs) if cell.place == "optimizer"}
    columns = [Target(shape, step, noise) for shape in SHAPES for step in STEPS]
    rows = [[method.label, *(shown.get((method.label, target), "-") for target in columns)] for method in METHODS]
    return format_table([title, *(f"{target.shape}, {target.step:g}" for target in columns)], rows)


def full_table(runs: Runs) -> str:
    return corrected_table(runs, 0.0, "full gradients")


def noisy_table(runs: Runs) -> str:
    return corrected_table(runs, NOISE, "noisy gradients")


def windows_table(runs: Runs) -> str:
    """Format predicted and measured excess of the variance of N(0, 1), for optimizers with a second moment."""
    rows = []
    for cell in cells(runs):
        method = _METHODS[cell.optimizer]
        if cell.place == "optimizer" and cell.target.shape == "N(0, 1)" and method.is_normalised and not method.decay:
            numbers = second_moment_excess(method, cell.target), cell.corrected[0] - 1
            error = cell.row["stiff_error"] / cell.known[0]
            gradients = "noisy" if cell.target.noise else "full"
            window = "fixed" if method.is_fixed else f"{method.window:,.0f}"
            values = f"{numbers[0]:.3f}", f"{numbers[1]:+.3f} ± {error:.3f}"
            rows.append([cell.optimizer, window, gradients, f"{cell.target.step:g}", *values])
    return format_table(["optimizer", "window W", "gradients", "step s", "predicted", "measured"], rows)


def all_cells(runs: Runs) -> str:
    """Format every cell with noise in the optimizer's step: variances, known variances, means, standard errors."""
    head = ["optimizer", "gradients", "target", "step", "variance", "known", "corrected", "mean", "within 5 %"]
    rows = []
    for cell in (cell for cell in cells(runs) if cell.place == "optimizer"):
        row, target, number = cell.row, cell.target, len(cell.corrected)
        measured = [f"{row[name]:.3f} ± {row[name + '_error']:.3f}" for name in ("stiff", "slow")[:number]]
        rows.append(
            [
                cell.optimizer,
                "noisy" if target.noise else "full",
                target.shape,
                f"{target.step:g}",
                " / ".join(measured),
                " / ".join(f"{x:.3f}" for x in cell.known[:number]),
                " / ".join(f"{x:.3f}" for x in cell.corrected),
                f"{row['mean']:+.3f} ± {row['mean_error']:.3f}",
                "yes" if cell.is_right else "**no**",
            ]
        )
    return format_table(head, rows)


# The tables of docs/noise.md, by the name in the comments around them.
BLOCKS: dict[str, Callable[[Runs], str]] = {"places": places_table}


def replaced(page: str, name: str, block: str) -> str:
    """Replace the text between two comments of a page.

    Raises:
        ValueError: the page does not have these comments once each.
    """
    begin, end = f"<!-- begin: results/sampling/{name} -->", f"<!-- end: results/sampling/{name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"expected the comments {begin!r} and {end!r} once each")
    return f"{page.partition(begin)[0]}{begin}\n\n{block}\n\n{end}{page.partition(end)[2]}"


def describe(runs: Runs) -> str:
    """Format the page of all results."""
    versions = sorted({", ".join(f"{name} {version}" for name, version in run["versions"].items()) for run in runs})
    dates = sorted({run["date"] for run in runs})
    chains = ", ".join(f"{count:,}" for count in sorted({run["chains"] for run in runs}))
    found = [cell for cell in cells(runs) if cell.place == "optimizer"]
    errors = [cell.row[name] for cell in found for name in ("stiff_error", "slow_error", "mean_error")]
    right = sum(cell.is_right for cell in found)
    furthest = max(abs(cell.row["mean"]) for cell in found)
    return f"""# Samples of Gaussians under four optimizers

`python -m studies.sampling.run`
({"; ".join(versions)}, CPU, one thread, {" to ".join(dict.fromkeys((dates[0], dates[-1])))}).
The runs took {sum(run["seconds"] for run in runs):,} s on a busy machine, with {chains} chains for each target.
`gaussians.json` has the command, length and duration of each run.

SGLD at T = 1. *Step* is the effective step: step times curvature along the stiffest direction. Chains start from the
target. They take 10 / step steps before the first sample, and 20 / step with a fixed second moment; then 5 / step
steps. (Noise in the parameter or gradient: see `studies/sampling/run.py`.) Standard errors are computed over
independent chains, and are at most {max(errors):.3f} with `noise_in="optimizer"`. All runs use the same random numbers,
so that errors by chance are similar in all rows.

## Three settings of `noise_in`

Target N(0, 1), full gradients: variance of samples divided by that of the target. Columns: `noise_in` and step.

{places_table(runs)}

## `noise_in="optimizer"`

Variance of samples, divided by the variance that the optimizer would have with a constant second moment; 1 is right.
That known variance is the target's, times the error of finite steps, times 1 + eta V / 2 for gradient noise of variance
V, where eta is the step divided by the curvature. The error of finite steps is 1 / (1 - step / 2) for SGD and RMSprop.
With momentum it is the solution of a linear recursion: 1.001 with momentum 0.9 and step 0.05, and 0.967 with Nesterov's
form.

Columns: target and step. Correlated: correlation 0.6, stiff / slow direction; the slow one has a quarter of the
curvature. Bold: a variance is off by more than 5 %, or the mean by more than 5 % of a standard deviation.

{full_table(runs)}

Noisy: gradient noise with {NOISE:g} times the standard deviation of the gradients.

{noisy_table(runs)}

*b2*, *alpha*: decay rate of the second moment. *Fixed v*: default decay rate, then `fix_second_moment` after a
quarter of the burn-in. Adagrad is refused by `repel` for rules with noise: its steps decay to zero by themselves.

{right} of {len(found)} cells are within 5 %. The largest distance of a mean from zero is {furthest:.3f} standard
deviations.

## Why cells are off

With a second moment v, steps are proportional to 1 / sqrt(v), and chains stay at a place for a time proportional to
sqrt(v). If v averages over W steps, and W is not much longer than the decorrelation time 1 / s, then v is large
where gradients are large, which is far from the mode. For a Gaussian in one dimension the excess of the variance is,
to first order, 1 / ((1 + r²)(1 + 2 s W)), where gradient noise is r times as large as gradients. Predicted and
measured, for N(0, 1) and after the correction above:

{windows_table(runs)}

Three observations confirm the explanation: the prediction agrees with all windows and steps; a fixed second moment
removes the excess; and so does weighting each sample by its step (a test does so).

## All cells

*Variance*: divided by that of the target. *Known*: what it would be with a constant second moment. *Mean*: the
coordinate that is furthest from zero, in standard deviations of the target.

{all_cells(runs)}
"""

"""Read differences from plain attention out of the committed results of a checkout, the folder `results`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.metrics.student import interval, quantile

# Tables and figures of the paper -> files in the folder of results that show the same, if they exist.
_SENTENCES = tuple(f"classification/{name}.md" for name in ("age", "yelp", "snli"))
_SIZES = ("classification/second_round/paper_sizes.md", "classification/paper_sizes.md")
_FOLLOW_UP = "classification/second_round/follow_up.md"
_AGE, _REVIEWS = "reproduce/age", "reproduce/movie-reviews"
FILES: dict[str, tuple[str, ...]] = {
    "table1": (*_SIZES, *_SENTENCES, f"{_AGE}/table1.md", f"{_REVIEWS}/table1.md"),
    "table2": (*(f"translation/{name}.md" for name in ("multi30k", "tatoeba", "europarl")), "bench/bench-cuda.md"),
    "table3": ("pretraining/glue.md",),
    "table4": ("graphs/agenda.md", "graphs/webnlg.md"),
    "sgld": (*_SENTENCES, "translation/multi30k.md", "sampling/recipes.md", f"{_AGE}/sgld.md"),
    "priors": (*_SENTENCES, f"{_AGE}/priors.md"),
    "modules": ("translation/ablation.md",),
    "cosine": (*_SIZES, *_SENTENCES, f"{_AGE}/cosine.md"),
    "attention-maps": ("classification/second_round/follow_up/maps.html", f"{_REVIEWS}/attention-maps.md"),
    "redundancy": ("translation/redundancy.md",),
    "heads": ("translation/heads.md", _FOLLOW_UP, f"{_REVIEWS}/heads.md"),
    "calibration": (*_SIZES, "classification/snli.md"),
    "entropy": (_FOLLOW_UP, f"{_REVIEWS}/entropy.md"),
}


def committed(artefact: str, folder: Path) -> list[Path]:
    """List the committed results on a table or figure of the paper; empty if there are none."""
    return [folder / name for name in FILES.get(artefact, ()) if (folder / name).is_file()]


class MissingFile(DataError):
    """A file of results does not exist. `name` is its path below the folder of results."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(f"{folder / name}: no such file; --from expects the folder results of a checkout")
        self.name = name


@dataclass(frozen=True)
class Gain:
    """A difference from plain attention with its 95 % interval.

    Args:
        mean: the difference.
        low: lower end of the interval.
        high: upper end of the interval.
        p_value: p-value of the difference; NaN if there is no test.
        is_one_seed: the interval is over test items of one seed, so it does not cover new trainings.
    """

    mean: float
    low: float
    high: float
    p_value: float = math.nan
    is_one_seed: bool = False

    def text(self, digits: int) -> str:
        return " ".join([f"{self.mean:+.{digits}f}", f"[{self.low:+.{digits}f}, {self.high:+.{digits}f}]"])


@dataclass(frozen=True)
class ResultFiles:
    """The JSON files of a folder of results.

    Raises:
        DataError: the folder does not exist.
    """

    folder: Path

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder; pass the folder results of a checkout with --from")

    def read(self, name: str) -> Any:
        """Read a file.

        Raises:
            MissingFile: there is no such file.
            DataError: the file is damaged.
        """
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingFile(self.folder, name) from None
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from None

    def row(self, name: str, label: str) -> dict[str, Any]:
        """Return the row of a method on the test set, after the longest training if there are several lengths.

        Raises:
            DataError: the file has no such row.
        """
        table = self.read(name)
        if "sections" in table:
            table = max(table["sections"], key=lambda section: int(section["epochs"]))["parts"]
        rows: list[dict[str, Any]] = table.get("rows") or table["test"]["rows"]
        for row in rows:
            if row["label"] == label:
                return row
        raise DataError(f"{self.folder / name}: expected a row {label!r}, got {', '.join(r['label'] for r in rows)}")

    def paired(self, name: str, label: str, metric: str, scale: float = 1.0) -> Gain:
        """Return the difference from the first row that the study computed, paired by seed and item."""
        return _gain(self.row(name, label)["against"][metric], scale)

    def unpaired(self, name: str, label: str, metric: str, scale: float = 1.0, other: str = "MA") -> Gain:
        """Compute the difference from `other` of two means over seeds, with Welch's interval."""
        first, second = self.row(name, label), self.row(name, other)
        counts = [len(each["seeds"]) for each in (first, second)]
        means = [each["cells"][metric]["mean"] for each in (first, second)]
        errors = [each["cells"][metric]["deviation"] ** 2 / n for each, n in zip((first, second), counts, strict=True)]
        degrees = sum(errors) ** 2 / sum(error**2 / (n - 1) for error, n in zip(errors, counts, strict=True))
        half = quantile(0.95, max(1, math.floor(degrees))) * math.sqrt(sum(errors))
        difference = means[0] - means[1]
        return Gain(*(scale * x for x in (difference, difference - half, difference + half)))

    def removed_shares(self, name: str, label: str, counts: Callable[[float], bool]) -> list[float]:
        """Compute the share of heads whose change in accuracy `counts`, in percent, one for each seed."""
        seeds = self.read(name)[label]
        return [100 * statistics.fmean(counts(change) for change in seeds[seed]) for seed in sorted(seeds)]

    def removals(self, name: str, label: str, counts: Callable[[float], bool]) -> Gain:
        """Compute the difference from MA in the share of heads whose change in accuracy `counts`, in points."""
        shares = [self.removed_shares(name, method, counts) for method in ("MA", label)]
        differences = [ours - plain for plain, ours in zip(*shares, strict=True)]
        limits = interval(differences)
        assert limits is not None
        return Gain(statistics.fmean(differences), *limits)

    def glue(self, task: str) -> Gain:
        """Return the difference in a GLUE score, over pre-trainings."""
        return _gain(self.read("pretraining/glue.json")["against"]["svgd"][task])

    def pretrainings(self) -> str:
        """Describe the pre-trainings behind the GLUE scores, such as "2 pre-trainings with the same seed"."""
        counts = self.read("pretraining/glue.json")["against"]["svgd"]["mean"]
        trained, seeds = counts["pretrainings"], counts["seeds"]
        if trained == seeds:
            return f"{trained} pre-trainings"
        return f"{trained} pre-trainings with {'the same seed' if seeds == 1 else f'{seeds} seeds'}"

    def step_time(self) -> Gain:
        """Return the relative step time minus 1, in percent."""
        time = self.read("bench/bench-cuda-4096.json")["steps"]["4096"]["all layers"]
        return Gain(*(100 * (time[key] - 1) for key in ("ratio", "low", "high")))

    def sizes(self, data: str, arm: str, metric: str, control: str = "", *, first_round: bool = False) -> Gain:
        """Return a difference at the paper's sizes, from plain attention or a control; accuracy and ECE in points."""
        summary = self.summary(data, first_round=first_round)
        row = summary["controls"][control]["of"][arm] if control else summary["arms"][arm]["against_plain"]
        return _gain(row[metric], _scale(metric))

    def between(self, data: str, arm: str, other: str, metric: str) -> Gain:
        """Return the difference between two methods at the paper's sizes; accuracy and ECE in points."""
        return _gain(self.summary(data)["between"][f"{arm} minus {other}"][metric], _scale(metric))

    def wider_search(self, data: str, arm: str, other: str, metric: str) -> Gain:
        """Return the difference of a method with the best settings of its wider search from another method."""
        return _gain(self._follow_up(f"wide, {data}")[arm]["against"][other][metric], _scale(metric))

    def wider_seeds(self, data: str, arm: str) -> int:
        """Return the number of seeds of the final runs of a wider search."""
        return len(self._follow_up(f"wide, {data}")[arm]["seeds"])

    def foreign_entropy(self, data: str, arm: str) -> Gain:
        """Return the difference from plain attention in the entropy of predictions on texts of another dataset."""
        return _gain(self._follow_up(f"entropy, {data}")[arm]["against_plain"]["foreign_entropy"])

    def control_minus_plain(self, data: str, control: str, metric: str) -> Gain:
        """Return the difference of a control from plain attention at the paper's sizes; accuracy and ECE in points."""
        return _gain(self.summary(data)["controls"][control]["against_plain"][metric], _scale(metric))

    def summary(self, data: str, *, first_round: bool = False) -> dict[str, Any]:
        """Return the results of a dataset at the paper's sizes.

        The second round has Yelp from both rounds. SNLI was trained in the first alone.
        """
        second = {} if first_round else self.read("classification/second_round/paper_sizes.json")
        summary: dict[str, Any] = second.get(data) or self.read("classification/paper_sizes.json")[data]
        return summary

    def best_heads(self, data: str, arm: str) -> tuple[Gain, int, int]:
        """Compare accuracies, each method with its best number of heads: gain, plain attention's number, seeds."""
        rows = self._follow_up(f"best heads, {data}")
        error = _gain(rows[arm])
        return Gain(-error.mean, -error.high, -error.low), rows["ma"]["heads"], rows[arm]["seeds"]

    def _follow_up(self, part: str) -> dict[str, Any]:
        rows: dict[str, Any] = self.read("classification/second_round/follow_up.json")[part]
        return rows


def _scale(metric: str) -> float:
    return 100.0 if metric in ("accuracy", "ece15", "scaled_ece15", "oe15", "scaled_oe15") else 1.0


def _gain(compared: dict[str, Any], scale: float = 1.0) -> Gain:
    p_value = compared.get("p_value", compared.get("p"))
    mean, low, high = (scale * compared[key] for key in ("difference", "low", "high"))
    is_one_seed = compared.get("over") == "items" and compared.get("seeds", 1) < 2
    return Gain(mean, low, high, math.nan if p_value is None else p_value, is_one_seed)

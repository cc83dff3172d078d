"""Progress of the demo: a live table of all runs in a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from repulsive.lab.demo.runs import Job, Result
from repulsive.lab.demo.settings import ARMS, Settings
from repulsive.lab.demo.train import Measurement
from repulsive.lab.engine.progress import as_time

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 10  # characters of a curve
_LOSS_RANGE = (1.4, 3.0)  # nats per byte: the range in which a byte model of this size learns
_SIMILARITY_RANGE = (-1 / 3, 1.0)  # four heads cannot have a lower mean cosine
_WIDTH = 76  # columns of the table with curves
_HELP = "similarity: mean cosine between the attention logits of two heads; 1: the same"


class Lines:
    """Prints one line per finished run.

    Args:
        total: number of runs.
        print_line: prints a line.
    """

    def __init__(self, total: int, print_line: Callable[[str], None]) -> None:
        self._total = total
        self._done = 0
        self._print_line = print_line

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, job: Job, history: Sequence[Measurement]) -> None:
        """Print nothing: only finished runs are shown."""

    def ended(self, job: Job, result: Result) -> None:
        self._done += 1
        self._print_line(
            f"{self._done:>2} of {self._total}  seed {job.seed}  {job.arm:11}  held-out loss {result.held_out:.3f}  "
            f"cosine {result.mean:.2f}, largest {result.largest:.2f}"
        )


class LiveTable:
    """Shows loss and similarity of heads of all runs side by side while they train.

    Args:
        settings: sizes of the training.
        seeds: the seeds, one row each.
        console: rich console to draw on; None: stdout.
    """

    def __init__(self, settings: Settings, seeds: Sequence[int], console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._settings = settings
        self._seeds = seeds
        self._histories: dict[tuple[str, int], Sequence[Measurement]] = {}
        self._resumed = 0  # steps that were done before this start
        self._started = time.monotonic()
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, job: Job, history: Sequence[Measurement]) -> None:
        self._histories[job.arm, job.seed] = history

    def ended(self, job: Job, result: Result) -> None:
        if (job.arm, job.seed) not in self._histories:
            self._resumed += self._settings.steps
        self._histories[job.arm, job.seed] = result.history

    def render(self) -> Any:
        """Draw the table."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("seed", "", *ARMS):
            table.add_column(name, no_wrap=True, min_width=6 + _CURVE if name in ARMS and self._draws_curves else None)
        for seed in self._seeds:
            histories = [self._histories.get((arm, seed), ()) for arm in ARMS]
            losses = [self._cell([each.loss for each in history], _LOSS_RANGE, 3) for history in histories]
            cosines = [self._cell([each.mean for each in history], _SIMILARITY_RANGE, 2) for history in histories]
            table.add_row(str(seed), "loss", *losses)
            table.add_row("", "similarity", *cosines)
        return Group(table, Text(self._footer()))

    def _cell(self, values: Sequence[float], limits: tuple[float, float], digits: int) -> str:
        if not values:
            return ""
        number = f"{values[-1]:.{digits}f}"
        return f"{number:>5} {curve(values, limits, len(self._settings.measured))}" if self._draws_curves else number

    @property
    def _draws_curves(self) -> bool:
        return bool(self._console.width >= _WIDTH and self._console.encoding.lower().startswith("utf"))

    def _footer(self) -> str:
        histories = list(self._histories.values())  # a copy: this runs in rich's thread
        steps = sum(history[-1].step for history in histories if history)
        total = self._settings.steps * len(self._seeds) * len(ARMS)
        seconds, done = time.monotonic() - self._started, steps - self._resumed
        left = f", {as_time(seconds / done * (total - steps))} left" if done > 0 and steps < total else ""
        return f"{_HELP}\n{100 * steps // total} % of {total:,} steps, {as_time(seconds)}{left}"


def curve(values: Sequence[float], limits: tuple[float, float], total: int) -> str:
    """Draw a line of block characters that grows to `_CURVE` characters; values outside the limits are clipped.

    Example:
        >>> curve([0.0, 0.5, 1.0], (0.0, 1.0), total=3)
        '▁▁▁▁▅▅▅███'
    """
    low, high = limits
    drawn = ""
    for place in range(_CURVE):
        index = place * total // _CURVE
        if index < len(values):
            share = min(1.0, max(0.0, (values[index] - low) / (high - low)))
            drawn += _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]
    return drawn

"""One case: a valid sample is copied and damaged, something reads it, and what it may have done is checked."""

import hashlib
import io
import random
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repulsive.cli.app import run as run_words
from repulsive.errors import RepulsiveError
from repulsive.lab.text.folders import MANIFEST
from tests.fuzz.damage import Draw, damage

SECONDS = 10.0  # CPU time; a case that takes longer hangs: one takes milliseconds
PATIENCE = 20  # a case that waits hangs after this many times SECONDS: another process may have the cores
WORKED = "worked"


class Hangs(BaseException):
    """No `Exception`, so that nothing on the way can take it for an error of its own."""


@dataclass(frozen=True)
class Subject:
    """Something that reads files.

    Args:
        name: for messages.
        make: writes a valid sample into a folder.
        read: reads the sample in a folder; what it writes goes to the path given second, and nowhere else.
        words: the command line that does the same, of those that have one.
        among: pattern of the files that are damaged.
        sealed: after the damage makes the checksums right again, so that what lies behind them is met.
        writes: does it make a folder that is whole or not there?
    """

    name: str
    make: Callable[[Path], Any]
    read: Callable[[Path, Path], Any]
    words: Callable[[Path, Path], list[str]] | None = None
    among: str = "**/*"
    sealed: Callable[[Path], Any] | None = None
    writes: bool = False


@dataclass
class Samples:
    """Samples that are made once, and what is made of them undamaged.

    Args:
        folder: where they are kept.
    """

    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def of(self, subject: Subject) -> Path:
        """A folder with the sample, `in`, and, where the subject writes one, the folder made of it, `out`."""
        if subject.name not in self.made:
            place = self.folder / subject.name.replace(" ", "-")
            (place / "in").mkdir(parents=True)
            subject.make(place / "in")
            with quietly():
                subject.read(place / "in", place / "out")  # a sample that cannot be read would test nothing
            self.made[subject.name] = place
        return self.made[subject.name]


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def attempt(subject: Subject, seed: int, samples: Samples, place: Path, by_words: bool = False) -> str:
    """Carry out one case.

    Args:
        subject: what reads.
        seed: of the damage.
        samples: where valid ones are.
        place: a folder that is not there yet; it is removed when all went well.
        by_words: through the command line.

    Returns:
        "worked", or the name of the error.

    Raises:
        AssertionError: another error than ours, a case that hangs, or something written that should not be.
    """
    sample = samples.of(subject)
    draw = random.Random(f"{subject.name} {seed}")
    shutil.copytree(sample / "in", place / "in", symlinks=True)
    replaces = subject.writes and draw.random() < 0.3
    if replaces:
        shutil.copytree(sample / "out", place / "out")
    (place.parent / "outside.txt").write_text("not yours")
    (place / "beside.txt").write_text("not yours either")
    files = sorted(path for path in (place / "in").glob(subject.among) if path.is_file())
    damages = damage(place / "in", files, draw)
    if subject.sealed is not None:
        with quietly():
            subject.sealed(place / "in")
    before, was = _snapshot(place, "out"), _snapshot(place / "out")
    where = f"{subject.name}, seed {seed} ({'; '.join(damages)}), left in {place}"
    ended = _ended(subject, place, by_words, where, draw)
    assert _snapshot(place, "out") == before, f"{where}: {ended}, and changed {_difference(before, place)}"
    assert (place.parent / "outside.txt").read_text() == "not yours", f"{where}: wrote outside"
    if subject.writes and ended != WORKED:
        whole = not replaces and (place / "out" / MANIFEST).exists()
        assert not whole, f"{where}: {ended}, and left a folder that looks whole"
        assert _snapshot(place / "out") == was, f"{where}: {ended}, and changed what was prepared there"
    shutil.rmtree(place)
    return ended


def _ended(subject: Subject, place: Path, by_words: bool, where: str, draw: Draw) -> str:
    try:
        with quietly(), _limited(SECONDS):
            if not by_words or subject.words is None:
                subject.read(place / "in", place / "out")
                return WORKED
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
                code = run_words(subject.words(place / "in", place / "out"))
            lines = said.getvalue().splitlines()
            assert code in (0, 2) and "Traceback" not in said.getvalue(), f"{where}: {code}, {lines}"
            assert code == 0 or lines[-1].startswith("repulsive: "), f"{where}: {code}, {lines}"
            return WORKED if code == 0 else "exit code 2"
    except RepulsiveError as error:
        if str(error).strip():
            return type(error).__name__
        raise AssertionError(f"{where}: {type(error).__name__} without a message") from None
    except Hangs:
        trace = traceback.format_exc(limit=-4)
        limits = f"{SECONDS:g} s of CPU time, or {PATIENCE * SECONDS:g} s"
        raise AssertionError(f"{where}: more than {limits}\n{trace}") from None
    except AssertionError:
        raise
    except Exception as error:
        trace = traceback.format_exc(limit=-6)
        raise AssertionError(f"{where}: {type(error).__name__}, not an error of this package\n{trace}") from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `Hangs` after some seconds of CPU time, or after `PATIENCE` times as many by the clock."""

    def ring(number: int, frame: Any) -> None:
        raise Hangs

    before = {number: signal.signal(number, ring) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _snapshot(folder: Path, apart_from: str = "") -> dict[str, str]:
    """Every path below a folder with what it is; `apart_from` is a name at the top."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if apart_from and name.split("/")[0] == apart_from:
            continue
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        else:
            found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _difference(before: dict[str, str], place: Path) -> list[str]:
    after = _snapshot(place, "out")
    return sorted(name for name in before | after if before.get(name) != after.get(name))[:5]

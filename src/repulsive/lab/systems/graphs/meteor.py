"""METEOR: the official version 1.5 if Java and pycocoevalcap are installed, else NLTK's with WordNet, else none."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import DataError
from repulsive.extras import install_command

OFFICIAL, NLTK = "METEOR 1.5", "METEOR (NLTK)"
_EMPTY = "…"  # replaces an empty text, which the METEOR program does not accept


@dataclass(frozen=True)
class Meteor:
    """A METEOR score of a corpus.

    Args:
        value: the score, from 0 to 100.
        name: `OFFICIAL` or `NLTK`, which are not comparable: one may be nearly twice the other.
    """

    value: float
    name: str


def meteor(texts: Sequence[str], references: Sequence[Sequence[str]], which: str | None = None) -> Meteor | None:
    """Compute METEOR of lower-cased texts; None if neither program is installed.

    Args:
        texts: words separated by spaces.
        references: one or more references for each text.
        which: `OFFICIAL` or `NLTK`; None: the first that is installed.

    Raises:
        DataError: the requested program is not installed, or fails.
    """
    if which not in (None, OFFICIAL, NLTK):
        raise DataError(f"METEOR {which!r} is unknown; choose {OFFICIAL!r} or {NLTK!r}")
    if len(texts) != len(references) or not texts or not all(references):
        raise DataError(f"{len(texts)} texts for {len(references)} lists of references: one or more for each text")
    clean = [" ".join(text.lower().split()) for text in texts]
    others = [[" ".join(text.lower().split()) for text in some] for some in references]
    if which != NLTK and (program := official_program()) is not None:
        return Meteor(100 * _official(program, clean, others), OFFICIAL)
    if which == OFFICIAL:
        raise DataError(f"{OFFICIAL} needs Java and the package pycocoevalcap: {install_command('meteor')}")
    score = _nltk(clean, others)
    if score is None and which == NLTK:
        raise DataError(f"{NLTK} needs nltk and its WordNet: pip install nltk; python -m nltk.downloader wordnet")
    return None if score is None else Meteor(100 * score, NLTK)


def official_program() -> list[str] | None:
    """Return the command that runs METEOR 1.5; None if Java or pycocoevalcap is not installed."""
    java = shutil.which("java")
    package = importlib.util.find_spec("pycocoevalcap")
    if java is None or package is None:
        return None
    for folder in package.submodule_search_locations or ():
        jar = Path(folder) / "meteor" / "meteor-1.5.jar"
        if jar.is_file():
            return [java, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    return None


def _official(program: list[str], texts: list[str], references: list[list[str]]) -> float:
    """Ask the program for statistics of each text, then for the score of each text and of all together."""
    with tempfile.TemporaryFile() as errors:
        run = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        try:
            statistics = [
                _answer(run, " ||| ".join(["SCORE", *map(_plain, some), _plain(text)]))
                for text, some in zip(texts, references, strict=True)
            ]
            scores = [_answer(run, " ||| ".join(["EVAL", *statistics])), *(_answer(run) for _ in statistics)]
            return float(scores[-1])
        except (ValueError, OSError, EOFError):
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise DataError(f"{OFFICIAL} failed: {said[-1] if said else 'it said nothing'}") from None
        finally:
            run.kill()
            with suppress(OSError):  # input that the program has not read is dropped
                run.communicate()


def _answer(run: subprocess.Popen[str], line: str | None = None) -> str:
    assert run.stdin is not None and run.stdout is not None
    if line is not None:
        print(line, file=run.stdin, flush=True)
    if not (said := run.stdout.readline()):
        raise EOFError
    return said.strip()


def _plain(text: str) -> str:
    return " ".join(text.replace("|||", " ").split()) or _EMPTY


def _nltk(texts: list[str], references: list[list[str]]) -> float | None:
    try:
        importlib.import_module(
            "nltk.corpus"
        ).wordnet.ensure_loaded()  # without WordNet, synonyms would silently not match
        score = importlib.import_module("nltk.translate.meteor_score").meteor_score
        scores = [
            float(score([text.split() for text in some], text.split()))
            for text, some in zip(texts, references, strict=True)
        ]
    except (ImportError, LookupError, OSError):  # the package or WordNet is missing, or some file of it
        return None
    return sum(scores) / len(scores)

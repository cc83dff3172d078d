"""`repulsive prepare TASK`: raw texts to a folder that training reads in a moment."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repulsive.cli.say import say
from repulsive.safety.terminal import one_line

if TYPE_CHECKING:
    from repulsive.lab.text.prepared import Prepared

VARIABLE = "REPULSIVE_DATA"


def prepare(
    task: Annotated[
        str,
        typer.Argument(
            help="yelp, age, snli, tsv, translation, glue, pretrain, graphs, lm, lm-toy, reviews or movie-reviews."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help=f"Folder of the raw files; by default ${VARIABLE}/TASK, or ${VARIABLE}.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make; by default prepared/TASK.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="spacy, regex; translation: moses, normalized, none; lm: bytes, wordpiece.")
    ] = None,
    lowercase: Annotated[
        bool | None, typer.Option(help="Lower-case the texts; the default, but for bytes of lm.")
    ] = None,
    minimum: Annotated[int, typer.Option(help="How often a word occurs in train to be known.")] = 2,
    most: Annotated[int | None, typer.Option(help="Words in the vocabulary; translation: pieces, 10,000.")] = None,
    longest: Annotated[int | None, typer.Option(help="Words kept of a sentence; the task has a default.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="File of GloVe vectors.")] = None,
    size: Annotated[int | None, typer.Option(help="Numbers in a vector; by default as in the first line.")] = None,
    half_vectors: Annotated[bool, typer.Option("--half-vectors", help="Store vectors in 16 bits.")] = False,
    train: Annotated[int | None, typer.Option(help="yelp from JSON, reviews: texts to train on.")] = None,
    dev: Annotated[float | None, typer.Option(help="The same for dev; age, pretrain, lm: the share it takes.")] = None,
    test: Annotated[int | None, typer.Option(help="The same for test.")] = None,
    label: Annotated[str | None, typer.Option(help="tsv: the label's column, name or number from 0.")] = None,
    text: Annotated[str | None, typer.Option(help="tsv: the text's column, name or number from 0.")] = None,
    header: Annotated[bool | None, typer.Option(help="tsv: does the first line name the columns?")] = None,
    aspects: Annotated[tuple[int, int] | None, typer.Option(help="reviews: fewest and most aspects.")] = None,
    filler: Annotated[int | None, typer.Option(help="reviews: most sentences without an opinion at a time.")] = None,
    source: Annotated[str | None, typer.Option(help="translation: from which language; de by default.")] = None,
    target: Annotated[str | None, typer.Option(help="translation: into which language; en by default.")] = None,
    ratio: Annotated[float | None, typer.Option(help="translation: most words for one of the other side; 9.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="translation: a further test set, its path without .de; repeatable."),
    ] = None,
    glue_task: Annotated[
        str | None, typer.Option("--task", help="glue: cola, sst, mrpc, sts, qqp, mnli, qnli or rte.")
    ] = None,
    vocabulary: Annotated[Path | None, typer.Option(help="glue, pretrain, lm: vocab.txt; glue: or its folder.")] = None,
    held_out: Annotated[float | None, typer.Option(help="glue: share of train that dev takes; 0.")] = None,
    stops: Annotated[
        str | None, typer.Option(help="glue: full stops that texts lose: keep, final, all; auto: as those of train.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="pretrain: pieces of a block; 128.")] = None,
    packing: Annotated[str | None, typer.Option(help="pretrain: full, or official: with padding.")] = None,
    suffix: Annotated[str | None, typer.Option(help="lm: how names of train, dev and test end; txt.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    limit: Annotated[int, typer.Option(help="Bad lines that may be skipped in a file.")] = 20,
    jobs: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is prepared there.")] = False,
) -> None:
    """Make words, a vocabulary and numbers of a task's texts, once, for training to read."""
    from repulsive.lab.text.plan import plan
    from repulsive.lab.text.prepare import run

    if jobs is not None and jobs < 1:
        raise typer.BadParameter(f"{jobs}: at least 1", param_hint="--jobs")
    given = {
        "train": train,
        "dev": int(dev) if dev is not None and dev >= 1 and dev == int(dev) else dev,
        "test": test,
        "label": _column(label),
        "text": _column(text),
        "header": header,
        "aspects": aspects,
        "filler": filler,
        "source": source,
        "target": target,
        "ratio": ratio,
        "also": _named(also) if also else None,
        "glue_task": glue_task,
        "vocabulary": vocabulary,
        "held_out": held_out,
        "stops": stops,
        "length": length,
        "packing": packing,
        "suffix": suffix,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    out = out or Path("prepared") / task / (glue_task or "").lower()
    if task in ("pretrain", "lm", "lm-toy"):
        unused: dict[str, Any] = {"most": most, "longest": longest, "vectors": vectors, "size": size}
        unused |= {"half_vectors": half_vectors or None, "minimum": minimum if minimum != 2 else None}
        unused |= {"tokenizer": tokenizer, "lowercase": lowercase}
        options |= {name: value for name, value in unused.items() if value is not None}
        options |= {"seed": seed, "limit": limit}
        if task == "pretrain":
            _pretrain(data or default_data(task), out, jobs, force, **options)
        else:
            _text(task, data or default_data(task), out, force, **options)
        return
    lowercase = lowercase is not False
    if task == "graphs":
        _graphs(
            data or default_data(task),
            out,
            force,
            tokenizer=tokenizer,
            lowercase=lowercase,
            minimum=minimum,
            most=most,
            longest=longest,
            vectors=vectors,
            size=size,
            half_vectors=half_vectors,
            seed=seed,
            limit=limit,
            **options,
        )
        return
    made = plan(
        task,
        data or default_data(task),
        out,
        tokenizer=tokenizer,
        lowercase=lowercase,
        minimum=minimum,
        most=most,
        longest=longest,
        vectors=vectors,
        size=size,
        half_vectors=half_vectors,
        seed=seed,
        limit=limit,
        **options,
    )
    found = None if force else made.already()
    if found is not None:
        say(f"{out} is prepared already, with the same settings from the same files; --force makes it anew")
        return
    with _shown() as progress:
        found = run(made, jobs, progress)
    say(f"{task} -> {out}\n{summary(found)}")


def _pretrain(data: Path | None, out: Path, jobs: int | None, force: bool, **options: Any) -> None:
    """The same for a corpus, which may be larger than memory."""
    from repulsive.errors import DataError
    from repulsive.lab.systems.electra import prepare as pretrain

    known = ("vocabulary", "length", "packing", "dev", "lowercase", "seed", "limit")
    for name in options:
        if name not in known:
            raise DataError(f"task 'pretrain' has no option {name!r}; it has {', '.join(known)}")
    if data is None or "vocabulary" not in options:
        missing = "the texts to train on: give --data" if data is None else "a vocabulary: give --vocabulary vocab.txt"
        raise DataError(f"task 'pretrain' needs {missing}")
    made = pretrain.plan_pretrain(data, options.pop("vocabulary"), out, **options)
    if not force and made.already() is not None:
        say(f"{out} is prepared already, with the same settings from the same files; --force makes it anew")
        return
    with _shown() as progress:
        found = made.make(jobs, progress)
    say(f"pretrain -> {out}\n{pretrain.summary(found)}")


def _text(task: str, data: Path | None, out: Path, force: bool, **options: Any) -> None:
    """The same for running text."""
    from repulsive.errors import DataError
    from repulsive.lab.systems.lm import prepare as prepare_text

    toy = task == prepare_text.TOY
    known = ("seed", "limit") if toy else ("tokenizer", "vocabulary", "lowercase", "suffix", "dev", "seed", "limit")
    for name in options:
        if name not in known:
            raise DataError(f"task {task!r} has no option {name!r}; it has {', '.join(known)}")
    if toy and data is not None:
        raise DataError(f"task {task!r} is generated: it reads no data, and {data} would not be used")
    if not toy and data is None:
        raise DataError(f"task {task!r} needs the texts to train on: give --data")
    if toy:
        made = prepare_text.plan_toy(out, seed=options["seed"])
    else:
        assert data is not None
        made = prepare_text.plan_text(data, out, **options)
    if not force and made.already() is not None:
        say(f"{out} is prepared already, with the same settings from the same files; --force makes it anew")
        return
    with _shown() as progress:
        found = made.make(progress)
    say(f"{task} -> {out}\n{prepare_text.summary(found)}")


def _graphs(data: Path | None, out: Path, force: bool, **settings: Any) -> None:
    """The same for graphs with texts about them."""
    from repulsive.errors import DataError
    from repulsive.lab.systems.graphs import prepare as prepare_graphs

    if data is None:
        raise DataError(f"task 'graphs' needs the folder of its files: give --data, or set {VARIABLE}")
    made = prepare_graphs.plan_graphs(data, out, **settings)
    if not force and made.already() is not None:
        say(f"{out} is prepared already, with the same settings from the same files; --force makes it anew")
        return
    with _shown() as progress:
        found = made.make(progress)
    say(f"graphs -> {out}\n{prepare_graphs.summary(found)}")


def default_data(task: str) -> Path | None:
    """Where a task's files are looked for when nobody says."""
    from repulsive.lab.text.sources import FROM_FILES

    root = os.environ.get(VARIABLE)
    if not root or task in ("reviews", "lm-toy"):
        return None
    folder = Path(root) / task
    return folder if folder.is_dir() else Path(root) if task in FROM_FILES else None


def summary(prepared: Prepared) -> str:
    """What was made, in a few lines.

    Args:
        prepared: as `run` returns it.
    """
    told, parts = prepared.manifest, prepared.parts
    rows = [["", *parts], *([name, *(f"{told[name][part]:,}" for part in parts)] for name in ("rows", "skipped"))]
    if any(told["unlabelled"].values()):
        rows.append(["unlabelled", *(f"{told['unlabelled'][part]:,}" for part in parts)])
    rows.append(["cut", *(f"{told['cut'][part]:,}" for part in parts)])
    rows.append(["unknown words", *(f"{told['unknown'][part]:.2%}" for part in parts)])
    for i, name in enumerate(prepared.classes):
        rows.append([f"class {name}", *(f"{(part.labels == i).double().mean():.1%}" for part in parts.values())])
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        row[0].ljust(wide[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], wide[1:], strict=True))
        for row in rows
    ]
    longest, coverage = told["settings"]["longest"], told["coverage"]
    known = f"vocabulary of {len(prepared.vocabulary):,}, sentences of {longest or 'all their'} words at most"
    if "ratio" in told["settings"]:
        asked = told["settings"]
        known += f"\n{asked['source']} to {asked['target']}, from {', '.join(told['sources'])}"
    if told.get("stops", "keep") != "keep":
        known += f"\nwithout their {'final ' if told['stops'] == 'final' else ''}full stops, as those of train"
    if coverage is not None:
        known += f"; vectors for {coverage['types']:.1%} of the vocabulary, {coverage['words']:.1%} of running words"
    return "\n".join([*lines, known])


def _column(given: str | None) -> str | int | None:
    return int(given) if given is not None and given.isdecimal() and len(given) < 10 else given


def _named(given: list[str]) -> dict[str, str]:
    """Name -> path, of words that are NAME=PATH."""
    found: dict[str, str] = {}
    for word in given:
        name, _, path = word.partition("=")
        if not name or not path:
            raise typer.BadParameter(f"{word!r}: give NAME=PATH, such as iwslt14=iwslt14/test", param_hint="--also")
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="--also")
        found[name] = path
    return found


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr while there is something to wait for, and warnings as single lines above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(
            f"repulsive: {one_line(str(message))}", markup=False, soft_wrap=True
        )

        def show(what: str, done: int, total: int) -> None:
            if not bar.tasks or bar.tasks[0].description != one_line(what):
                for old in bar.task_ids:  # a bar cannot forget its total
                    bar.remove_task(old)
                bar.add_task(one_line(what), total=total or None)
            bar.update(bar.task_ids[0], completed=done)

        yield show

"""Readers of raw files: what `repulsive prepare` reads, and movie reviews."""

from pathlib import Path
from typing import Any

from repulsive.lab.systems.classification.movie_reviews import fetch, read_movie_reviews
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra.prepare import plan_pretrain
from repulsive.lab.systems.graphs.prepare import plan_graphs, summarize
from repulsive.lab.systems.lm.prepare import plan_text
from repulsive.lab.text.prepared import Prepared
from tests.fuzz.harness import Subject
from tests.fuzz.raw_files import (
    GLUE,
    write_agenda_json,
    write_ages,
    write_corpus,
    write_glue,
    write_pairs,
    write_pan,
    write_snippets,
    write_snli,
    write_tsv,
    write_vectors,
    write_yelp,
    write_yelp_parts,
)
from tests.lab.systems.glue import glue_files
from tests.lab.systems.graphs import graph_files


def _prepared(task: str, source: str = "", **settings: Any) -> Any:
    def read(folder: Path, out: Path) -> Any:
        given = {name: folder / value if isinstance(value, Path) else value for name, value in settings.items()}
        prepare(task, folder / source, out, jobs=1, force=True, limit=3, **given)
        return Prepared.load(out)

    return read


def _words(task: str, *more: str, source: str = "") -> Any:
    def words(folder: Path, out: Path) -> list[str]:
        given = [str(folder / word[1:]) if word.startswith("@") else word for word in more]
        place = ["--data", str(folder / source), "--out", str(out)]
        return ["prepare", task, *place, "--force", "--limit", "3", "--jobs", "1", *given]

    return words


def _raw(
    name: str, make: Any, task: str, *, source: str = "", among: str = "**/*", more: Any = (), **settings: Any
) -> Subject:
    read, words = _prepared(task, source, **settings), _words(task, *more, source=source)
    return Subject(name, make, read, words, among=among, writes=True)


def read_glue(task: str) -> Subject:
    given = {"glue_task": task, "vocabulary": Path("vocab.txt")}
    more = ("--task", task, "--vocabulary", "@vocab.txt")
    folder = glue_files.COLUMNS[task][0]
    among = f"raw/{folder}/*"
    return _raw(f"glue {task}", write_glue, "glue", source="raw", among=among, more=more, **given)


def read_corpus(folder: Path, out: Path) -> None:
    settings: dict[str, Any] = {"length": 16, "dev": 0.2, "limit": 3}
    plan_pretrain(folder / "texts", out, vocabulary=folder / "vocab.txt", **settings).make(1)


def read_text(folder: Path, out: Path) -> None:
    settings: dict[str, Any] = {"tokenizer": "wordpiece", "vocabulary": folder / "vocab.txt", "dev": 0.2, "limit": 3}
    plan_text(folder / "texts", out, **settings).make()


def read_graphs(folder: Path, out: Path) -> None:
    summarize(plan_graphs(folder, out, minimum=1, limit=3, **_tokenizer(folder)).make())


def _tokenizer(folder: Path) -> dict[str, str]:
    """Only texts that are no words yet have one, and damage may have taken the file that tells."""
    return {"tokenizer": "regex"} if "webnlg" in str(folder) or any(folder.glob("*.jsonl")) else {}


def _graphs(name: str, make: Any, *more: str) -> Subject:
    words = _words("graphs", "--minimum", "1", *more)
    without_jobs = lambda folder, out: [word for word in words(folder, out) if word not in ("--jobs", "1")]  # noqa: E731
    return Subject(name, make, read_graphs, without_jobs if not more else words, writes=True)


def read_snippets(folder: Path, out: Path) -> None:
    for path in folder.glob("*"):
        read_movie_reviews(path, limit=3)
    try:
        if any(folder.glob("*")):  # else it would be fetched
            fetch(folder)
    except Exception as error:  # ours is expected: the sample is not the published archive
        if "SHA-256" not in str(error):
            raise


RAW = [
    _raw("tsv", write_tsv, "tsv", tokenizer="regex", more=("--tokenizer", "regex")),
    _raw(
        "vectors",
        write_vectors,
        "tsv",
        among="glove.txt",
        tokenizer="regex",
        vectors=Path("glove.txt"),
        more=("--tokenizer", "regex", "--vectors", "@glove.txt"),
    ),
    _raw(
        "yelp json",
        write_yelp,
        "yelp",
        tokenizer="regex",
        train=20,
        dev=8,
        test=8,
        more=("--tokenizer", "regex", "--train", "20", "--dev", "8", "--test", "8"),
    ),
    _raw("yelp tsv", write_yelp_parts, "yelp", tokenizer="regex", more=("--tokenizer", "regex")),
    _raw("age xml", write_pan, "age", tokenizer="regex", dev=0.3, more=("--tokenizer", "regex", "--dev", "0.3")),
    _raw("age tsv", write_ages, "age", tokenizer="regex", dev=0.3, more=("--tokenizer", "regex", "--dev", "0.3")),
    _raw("snli", write_snli, "snli", tokenizer="regex", more=("--tokenizer", "regex")),
    _raw(
        "translation",
        write_pairs,
        "translation",
        tokenizer="none",
        most=60,
        more=("--tokenizer", "none", "--most", "60"),
    ),
    *(read_glue(task) for task in GLUE),
    Subject(
        "pretrain",
        write_corpus,
        read_corpus,
        _words("pretrain", "--vocabulary", "@vocab.txt", "--length", "16", "--dev", "0.2", source="texts"),
        writes=True,
    ),
    Subject(
        "lm",
        write_corpus,
        read_text,
        _words("lm", "--tokenizer", "wordpiece", "--vocabulary", "@vocab.txt", "--dev", "0.2", source="texts"),
        writes=True,
    ),
    _graphs("agenda tsv", graph_files.write_tsv),
    _graphs("agenda json", write_agenda_json),
    _graphs("agenda archive", graph_files.write_archive),
    _graphs("webnlg", graph_files.write_webnlg, "--tokenizer", "regex"),
    Subject("movie reviews", write_snippets, read_snippets),
]

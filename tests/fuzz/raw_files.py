"""Small valid files of every dataset, as they are downloaded."""

import json
import lzma
import random
from pathlib import Path

from tests.lab.systems.classification.test_movie_reviews import write_archive
from tests.lab.systems.electra.test_prepare import open_web_text, packed
from tests.lab.systems.glue import glue_files
from tests.lab.systems.graphs import graph_files
from tests.lab.systems.translation import parallel_files

WORDS = ["good", "bad", "soup", "waiter", "the", "was", "very", "not", ",", ".", "isn't", "12", "3.5", "Café", "東京"]
GLUE = ("cola", "sts", "mnli")
ROWS = 30


def texts(seed: int, count: int = ROWS) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 9))) for _ in range(count)]


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_tsv(folder: Path) -> None:
    for seed, part in enumerate(("train", "dev", "test")):
        rows = [f"{text}\t{'yes' if i % 3 else 'no'}" for i, text in enumerate(texts(seed))]
        write_lines(folder / f"{part}.tsv", ["text\tlabel", *rows])


def write_vectors(folder: Path) -> None:
    write_tsv(folder)
    draw = random.Random(0)
    write_lines(
        folder / "glove.txt", [" ".join([word, *(f"{draw.gauss(0, 1):.3f}" for _ in range(4))]) for word in WORDS]
    )


def write_yelp(folder: Path) -> None:
    rows = [json.dumps({"stars": 1 + i % 5, "text": text, "useful": i}) for i, text in enumerate(texts(0, 40))]
    write_lines(folder / "yelp_academic_dataset_review.json", rows)


def write_yelp_parts(folder: Path) -> None:
    for seed, part in enumerate(("train", "dev", "test")):
        rows = [f"{1 + i % 5}\t{text}" for i, text in enumerate(texts(seed))]
        write_lines(folder / f"{part}.tsv", rows)


def write_pan(folder: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        truth = []
        for author, text in enumerate(texts(seed, 8)):
            truth.append(f"a{author}:::MALE:::{'18-24' if author % 2 else '50-XX'}")
            body = "".join(f"<document><![CDATA[{text} {i}]]></document>" for i in range(3))
            xml = f'<?xml version="1.0"?><author lang="en"><documents>{body}</documents></author>'
            write_lines(folder / part / f"a{author}.xml", [xml])
        write_lines(folder / part / "truth.txt", truth)


def write_ages(folder: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        rows = [f"{'18-24' if i % 2 else '50-XX'}\t{text}\tF\tauthor{i % 9}" for i, text in enumerate(texts(seed))]
        write_lines(folder / f"{part}.tsv", ["age\ttext\tgender\tauthor", *rows])


def write_snli(folder: Path) -> None:
    names = ("entailment", "neutral", "contradiction", "-")
    for seed, part in enumerate(("train", "dev", "test")):
        pairs = zip(texts(seed), texts(seed + 9), strict=True)
        rows = [{"gold_label": names[i % 4], "sentence1": a, "sentence2": b} for i, (a, b) in enumerate(pairs)]
        write_lines(folder / f"snli_1.0_{part}.jsonl", [json.dumps(row) for row in rows])


def write_pairs(folder: Path) -> None:
    parallel_files.write_pairs(folder, (30, 6, 6))


def write_glue(folder: Path) -> None:
    glue_files.write_vocabulary(folder)
    for task in GLUE:
        glue_files.write_task(folder / "raw", task, (20, 8, 5))


def write_corpus(folder: Path) -> None:
    glue_files.write_vocabulary(folder)
    pages = [text.encode() for text in texts(0, 40)]
    (folder / "texts").mkdir()
    open_web_text(folder / "texts" / "pages.tar.xz", packed(*pages[:20]), packed(*pages[20:]))
    documents = "\n\n".join(f"{text}\n{text} good" for text in texts(1, 40))
    (folder / "texts" / "a.txt").write_text(documents)
    (folder / "texts" / "b.txt.xz").write_bytes(lzma.compress(documents.encode()))


def write_agenda_json(folder: Path) -> None:
    graph_files.write_json(folder)
    (folder / "relations.vocab").write_text("\n".join(graph_files.RELATIONS))


def write_snippets(folder: Path) -> None:
    write_archive(folder, *(f"{i}\t{(i % 9) - 4}\t{text}" for i, text in enumerate(texts(0))))

"""Everything that reads files, with a small valid sample for each."""

import hashlib
import json
import lzma
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from repulsive.lab.engine.stop_signals import Stopped
from repulsive.lab.systems.classification.movie_reviews import fetch, read_movie_reviews
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra.blocks import Blocks
from repulsive.lab.systems.electra.prepare import plan_pretrain
from repulsive.lab.systems.graphs.prepare import plan_graphs, summarize
from repulsive.lab.systems.graphs.prepared import PreparedGraphs
from repulsive.lab.systems.lm.data import Text, numbers
from repulsive.lab.systems.lm.prepare import plan_text
from repulsive.lab.text.folders import MANIFEST
from repulsive.lab.text.prepared import Prepared
from tests.fuzz.harness import Subject
from tests.lab.engine import tiny
from tests.lab.judge import sample as judged
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


def _lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# -- raw files --------------------------------------------------------------------------------------------------------


def write_tsv(folder: Path) -> None:
    for seed, part in enumerate(("train", "dev", "test")):
        rows = [f"{text}\t{'yes' if i % 3 else 'no'}" for i, text in enumerate(texts(seed))]
        _lines(folder / f"{part}.tsv", ["text\tlabel", *rows])


def write_vectors(folder: Path) -> None:
    write_tsv(folder)
    draw = random.Random(0)
    _lines(folder / "glove.txt", [" ".join([word, *(f"{draw.gauss(0, 1):.3f}" for _ in range(4))]) for word in WORDS])


def write_yelp(folder: Path) -> None:
    rows = [json.dumps({"stars": 1 + i % 5, "text": text, "useful": i}) for i, text in enumerate(texts(0, 40))]
    _lines(folder / "yelp_academic_dataset_review.json", rows)


def write_yelp_parts(folder: Path) -> None:
    for seed, part in enumerate(("train", "dev", "test")):
        rows = [f"{1 + i % 5}\t{text}" for i, text in enumerate(texts(seed))]
        _lines(folder / f"{part}.tsv", rows)


def write_pan(folder: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        truth = []
        for author, text in enumerate(texts(seed, 8)):
            truth.append(f"a{author}:::MALE:::{'18-24' if author % 2 else '50-XX'}")
            body = "".join(f"<document><![CDATA[{text} {i}]]></document>" for i in range(3))
            xml = f'<?xml version="1.0"?><author lang="en"><documents>{body}</documents></author>'
            _lines(folder / part / f"a{author}.xml", [xml])
        _lines(folder / part / "truth.txt", truth)


def write_ages(folder: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        rows = [f"{'18-24' if i % 2 else '50-XX'}\t{text}\tF\tauthor{i % 9}" for i, text in enumerate(texts(seed))]
        _lines(folder / f"{part}.tsv", ["age\ttext\tgender\tauthor", *rows])


def write_snli(folder: Path) -> None:
    names = ("entailment", "neutral", "contradiction", "-")
    for seed, part in enumerate(("train", "dev", "test")):
        pairs = zip(texts(seed), texts(seed + 9), strict=True)
        rows = [{"gold_label": names[i % 4], "sentence1": a, "sentence2": b} for i, (a, b) in enumerate(pairs)]
        _lines(folder / f"snli_1.0_{part}.jsonl", [json.dumps(row) for row in rows])


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


# -- what was made of them --------------------------------------------------------------------------------------------


def seal_manifests(folder: Path) -> None:
    """Checksums of what is there now, where a manifest still has some."""
    for path in folder.rglob(MANIFEST):
        try:
            told = json.loads(path.read_bytes())
            listed = told["files" if "files" in told else "sha256"]
            for name in listed:
                file = path.parent / name
                if file.is_file():
                    listed[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            path.write_text(json.dumps(told))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
            continue


def make_prepared(folder: Path) -> None:
    prepare("reviews", None, folder / "data", train=30, dev=8, test=8, jobs=1)


def make_glue(folder: Path) -> None:
    raw, pieces = folder.parent / "raw", folder.parent
    write_glue(raw)
    prepare("glue", raw / "raw", folder / "data", glue_task="sts", vocabulary=raw / "vocab.txt")
    assert pieces.is_dir()


def make_pairs(folder: Path) -> None:
    write_pairs(folder.parent / "raw")
    prepare("translation", folder.parent / "raw", folder / "data", tokenizer="none", most=60, jobs=1)


def make_graphs(folder: Path) -> None:
    raw = graph_files.write_webnlg(folder.parent / "raw")
    plan_graphs(raw, folder / "data", tokenizer="regex", minimum=1).make()


def make_blocks(folder: Path) -> None:
    write_corpus(_fresh(folder.parent / "raw"))
    read_corpus(folder.parent / "raw", folder / "data")


def make_text(folder: Path) -> None:
    write_corpus(_fresh(folder.parent / "raw"))
    plan_text(folder.parent / "raw" / "texts" / "a.txt", folder / "data", dev=0.2).make()


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def use_prepared(folder: Path, out: Path) -> None:
    """Load it and take every sentence, as a training would."""
    from repulsive.lab.text.pieces import Pieces

    found = Prepared.load(folder / "data")
    for part in found.parts.values():
        for side in part.sentences:
            table, _ = side.padded(torch.arange(len(part)))
            assert int(table.max()) < len(found.vocabulary)
        if part.evidence is not None:
            part.evidence_mask(torch.arange(len(part)), int(part.lengths.max()))
    if found.task == "translation":
        Pieces.of(found).encode([["eins", "zwei"]])


def use_graphs(folder: Path, out: Path) -> None:
    """Load them and write every text out again."""
    found = PreparedGraphs.load(folder / "data")
    for part in found.parts.values():
        for graph in range(len(part)):
            for row in part.texts_of(graph):
                found.text(part.targets[row], part.copies[row], part.names[graph])


def use_blocks(folder: Path, out: Path) -> None:
    found = Blocks.load(folder / "data")
    for rows in found.parts.values():
        assert rows.shape[1] == found.length + 2


def use_text(folder: Path, out: Path) -> None:
    found = Text.load(folder / "data")
    for part, tokens in found.parts.items():
        assert int(numbers(tokens).max()) < found.vocabulary and found.tokens_per_byte(part) > 0


def make_again(folder: Path) -> None:
    write_tsv(folder.parent / "raw")
    prepare("tsv", folder.parent / "raw", folder / "data", tokenizer="regex", jobs=1)


def prepare_again(folder: Path, out: Path) -> None:
    """Asked for the same again, in a copy: what is there is taken, or refused."""
    write_tsv(out.parent / "out" / "raw")
    if (folder / "data").is_dir():
        shutil.copytree(folder / "data", out / "data", symlinks=True)
    prepare("tsv", out / "raw", out / "data", tokenizer="regex", jobs=1)


def _both(name: str, make: Any, use: Any) -> list[Subject]:
    """With wrong checksums, and with right ones around wrong content."""
    return [Subject(name, make, use), Subject(f"{name} sealed", make, use, sealed=seal_manifests)]


PREPARED = [
    *_both("prepared", make_prepared, use_prepared),
    *_both("prepared glue", make_glue, use_prepared),
    *_both("prepared pairs", make_pairs, use_prepared),
    *_both("prepared graphs", make_graphs, use_graphs),
    *_both("prepared blocks", make_blocks, use_blocks),
    *_both("prepared text", make_text, use_text),
    Subject("prepared again", make_again, prepare_again, sealed=seal_manifests),
]


# -- runs -------------------------------------------------------------------------------------------------------------


def make_run(folder: Path) -> None:
    data = tiny.make_data(folder.parent / "data")
    tiny.train(data, folder / "runs" / "seed-0", "training.log_every=5")


def read_run(folder: Path, out: Path) -> None:
    """What `ls`, `report` and `evaluate` read of a run."""
    from repulsive.lab.engine import tables
    from repulsive.lab.engine.runs import RunFolder
    from repulsive.lab.runs.listing import describe_runs
    from repulsive.lab.runs.load import facts, open_methods
    from repulsive.lab.runs.score import score

    describe_runs(folder)
    RunFolder(folder / "runs" / "seed-0").checkpoints.latest()
    methods = open_methods([folder / "runs"])
    facts(methods)
    for method in methods:
        method.curves("train", "loss")
    tables.as_markdown(tables.rows([folder / "runs"]))
    score([folder / "runs"], "test", device="cpu")


def make_stopped(folder: Path) -> None:
    """A training that was stopped in the middle, with two checkpoints."""
    data = tiny.make_data(folder.parent / "data")
    watcher = tiny.At(8, tiny.signalled(signal.SIGTERM))
    with suppress(Stopped):
        tiny.train(data, folder / "seed-0", "training.log_every=2", "training.save_every=4", watcher=watcher)
    assert len(list((folder / "seed-0" / "checkpoints").glob("step-*"))) == 2


def go_on(folder: Path, out: Path) -> None:
    """Resume a copy of it, which is what the training may write to."""
    from repulsive.lab.engine.launch import Spec
    from repulsive.lab.engine.runs import RunFolder
    from repulsive.lab.systems.registry import from_tables

    shutil.copytree(folder, out, symlinks=True)
    recipe = from_tables(RunFolder(out / "seed-0").recipe, "the run")
    if recipe.training.epochs > 2 or recipe.training.batch < 8:
        return  # a longer training than a test has time for
    made = tiny.loop(Spec(recipe, out / "seed-0", "cpu"))
    try:
        made.run()
    finally:
        made.folder.close()


def run_words(folder: Path, out: Path) -> list[str]:
    return ["evaluate", str(folder / "runs"), "--device", "cpu"]


RUNS = [
    Subject("run", make_run, read_run, run_words),
    Subject("run sealed", make_run, read_run, run_words, sealed=seal_manifests),
    Subject("resume", make_stopped, go_on, among="seed-0/[!t]*/**/*"),
    Subject("resume sealed", make_stopped, go_on, among="seed-0/checkpoints/**/*", sealed=seal_manifests),
]


# -- recipes, models, judges ------------------------------------------------------------------------------------------

PARENT = """# repulsive train parent.toml
task = "classification"
label = "parent"
data = { folder = "somewhere", share = 1.0 }
[optimizer]
name = "adam"
lr = 2e-3
betas = [0.9, 0.98]
[training]
epochs = 2
precision = "bf16"
"""
CHILD = """extends = "parent.toml"
label = "child"
seed = 3
[method]
rule = "spos"
alpha = "auto"
layers = [0, 1]
"""
CHANGES = (
    "optimizer.lr=0.001",
    "method.alpha=auto",
    "method.layers=[0,1]",
    "seed=4",
    "label=a b",
    "training.epochs=3",
    "data.folder=x/y",
    "optimizer.betas=[0.9,0.98]",
    "training.tf32=false",
    "method={rule='svgd'}",
)


def write_recipes(folder: Path) -> None:
    (folder / "parent.toml").write_text(PARENT)
    (folder / "child.toml").write_text(CHILD)


def read_recipe(folder: Path, out: Path) -> None:
    from repulsive.lab.systems.registry import open_recipe

    open_recipe(folder / "child.toml", ["training.batch=8"])


def write_changes(folder: Path) -> None:
    _lines(folder / "changes.txt", list(CHANGES))


def read_changes(folder: Path, out: Path) -> None:
    """Every line is one `--set`."""
    from repulsive.errors import ConfigError
    from repulsive.lab.engine.sweep import parse_stage
    from repulsive.lab.runs.plan import plan
    from repulsive.lab.systems.registry import open_recipe

    try:
        found = (folder / "changes.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return  # there are none
    for change in filter(None, found):
        try:
            open_recipe("yelp/svgd", [change])
            (spec,) = plan(["yelp/svgd"], [change], out=out, device="cpu")
            assert spec.folder.resolve().is_relative_to(out.resolve())
        except ConfigError:
            continue
        finally:
            with suppress(ConfigError):
                parse_stage([change])


def make_model(folder: Path) -> None:
    from repulsive.lab.systems.glue.model import make_encoder

    made = make_encoder("tiny", 20)
    made.save_pretrained(folder / "a")
    made.save_pretrained(folder / "b")
    weights = (folder / "b" / "model.safetensors").read_bytes()
    from safetensors.torch import load

    torch.save(load(weights), folder / "b" / "pytorch_model.bin")
    (folder / "b" / "model.safetensors").unlink()


def read_model(folder: Path, out: Path) -> None:
    from repulsive.lab.systems.glue.model import load_encoder

    first = None
    for name in ("a", "b"):
        try:
            load_encoder(folder / name)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def write_judged(folder: Path) -> None:
    judged.two_systems(folder)


def read_judged(folder: Path, out: Path) -> None:
    from repulsive.lab.judge.make import make

    out.mkdir(exist_ok=True)
    make(folder / "wavelet.jsonl", folder / "gearbox.jsonl", out / "page.html", count=4)


def judge_words(folder: Path, out: Path) -> list[str]:
    files = [str(folder / name) for name in ("wavelet.jsonl", "gearbox.jsonl")]
    out.mkdir(exist_ok=True)
    return ["judge", "make", *files, "--out", str(out / "page.html"), "--count", "4"]


def write_answers(folder: Path) -> None:
    from repulsive.lab.judge.key import read_key
    from repulsive.lab.judge.make import make

    files = judged.two_systems(folder.parent)
    key = read_key(make(*files, folder.parent / "page.html", count=4).key)
    for judge in ("ann", "bob"):
        chosen = {item: dict.fromkeys(judged.CRITERIA, "left" if item % 2 else "tie") for item in range(1, 5)}
        judged.saved(folder, key, judge, chosen)
    (folder / "page.key.json").write_bytes((folder.parent / "page.key.json").read_bytes())


def read_answers(folder: Path, out: Path) -> None:
    from repulsive.lab.judge.answers import read_all
    from repulsive.lab.judge.key import read_key
    from repulsive.lab.judge.tally import as_data, as_markdown, tally

    key = read_key(folder / "page.key.json")
    found = tally(key, read_all(sorted(folder.glob("answers-*.json")), key), resamples=50)
    as_markdown(found), as_data(found)


def answer_words(folder: Path, out: Path) -> list[str]:
    files = [str(folder / f"answers-{judge}.json") for judge in ("ann", "bob")]
    return ["judge", "tally", *files, "--key", str(folder / "page.key.json")]


def write_sentences(folder: Path) -> None:
    _lines(folder / "sentences.txt", texts(0))


def read_sentences(folder: Path, out: Path) -> None:
    from repulsive.diagnostics.loading import inputs

    inputs.read_sentences(folder / "sentences.txt", ["one more"], 20)


OTHERS = [
    Subject("recipe", write_recipes, read_recipe),
    Subject("changes", write_changes, read_changes),
    Subject("model", make_model, read_model),
    Subject("judge make", write_judged, read_judged, judge_words),
    Subject("judge tally", write_answers, read_answers, answer_words),
    Subject("sentences", write_sentences, read_sentences),
]
SUBJECTS = [*RAW, *PREPARED, *RUNS, *OTHERS]

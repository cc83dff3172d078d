"""Readers of recipes, models, answers of judges, and sentences."""

from contextlib import suppress
from pathlib import Path

import torch

from tests.fuzz.harness import Subject
from tests.fuzz.raw_files import texts, write_lines
from tests.lab.judge import sample as judged

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
    write_lines(folder / "changes.txt", list(CHANGES))


def read_changes(folder: Path, out: Path) -> None:
    """Every line is one `--set`."""
    from repulsive.errors import ConfigError
    from repulsive.lab.engine.sweep import parse_stage
    from repulsive.lab.runs.plan import plan
    from repulsive.lab.systems.registry import open_recipe

    try:
        found = (folder / "changes.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return  # the file is missing
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
    write_lines(folder / "sentences.txt", texts(0))


def read_sentences(folder: Path, out: Path) -> None:
    from repulsive.diagnostics.loading import inputs

    inputs.read_sentences(folder / "sentences.txt", ["one more"], 20)


INPUTS = [
    Subject("recipe", write_recipes, read_recipe),
    Subject("changes", write_changes, read_changes),
    Subject("model", make_model, read_model),
    Subject("judge make", write_judged, read_judged, judge_words),
    Subject("judge tally", write_answers, read_answers, answer_words),
    Subject("sentences", write_sentences, read_sentences),
]

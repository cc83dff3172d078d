"""The pre-training study at toy size: its plan, all stages, and the content of its tables."""

import json
import random
import statistics
import tarfile
from pathlib import Path

import pytest
import torch

from repulsive.heads import find_heads
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.export import export
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra.model import open_electra
from repulsive.lab.text.prepared import Prepared
from tests.lab.systems.glue import glue_files, toy_glue
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")
TASKS = ("cola", "sts", "mnli", "rte")
SMALL = ("model.width=16", "model.feed_forward=32", "model.embedding=8", "training.batch=8", "model.generator=0.5")
QUICK = ("training.epochs=1", "training.batch=32", "optimizer.clip=1.0")


@pytest.fixture(scope="module")
def script():
    with study("studies.pretraining.run") as module:
        yield module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Blocks and tasks with one vocabulary."""
    made = tmp_path_factory.mktemp("study")
    draw = random.Random(0)
    texts = [[" ".join(draw.choices(glue_files.WORDS, k=9)) for _ in range(5)] for _ in range(120)]
    (made / "corpus.txt").write_text("\n\n".join("\n".join(text) for text in texts) + "\n")
    toy_glue.make_data(made / "data" / "glue", *TASKS, sizes=(64, 32, 9))
    vocabulary = made / "data" / "glue" / "vocab.txt"
    prepare(
        "pretrain", made / "corpus.txt", made / "data" / "pretrain", jobs=1, vocabulary=vocabulary, length=32, dev=0.1
    )
    return made


def call(script, folder, *words, out="runs"):
    places = ("--data", folder / "data", "--out", folder / out, "--results", folder / "results", "--size", "tiny")
    settings = [f"--set={change}" for change in SMALL] + [f"--set-glue={change}" for change in QUICK]
    amount = ("--tokens", "2000", "--points", "2", "--jobs", "1", "--device", "cpu", "--tasks", *TASKS, "--items", "8")
    script.main([*map(str, places), *amount, "--methods", "ma", "svgd", *settings, *words])


@pytest.fixture(scope="module")
def trained(script, folder):
    call(script, folder, "--repeats", "2", "--drop-weights", "--stage", "pretrain", "finetune", "heads")
    return folder / "runs"


def test_the_plan_counts_by_hand(script, folder, capsys):
    """2000 tokens in two halves: 4 steps of 8 x 32 each. 64 rows of CoLA and 128 of STS, both ways round, by 32."""
    call(script, folder, "--dry-run", "--repeats", "5", "--seeds", "2", out="none")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[0]).startswith("pretrain: 4 runs, 4 to do, of 8 steps, 2,048 tokens, ")
    rows = {line[0]: line[1:] for line in lines[2:-1]}
    runs = 2 * 2 * (5 + 1)  # methods, seeds, repeats from the last models and from those before
    assert rows["cola"] == [str(runs), str(runs), "2", str(2 * runs)] and rows["sts"][2] == "4"
    assert rows["rte-mnli"] == ["20", "20", "2", "40"] and lines[-1][-2] == "8"
    assert not (folder / "none").exists()


def test_other_seeds_than_the_first_are_another_studys(trained, script, folder, capsys):
    call(script, folder, "--dry-run", "--repeats", "2", "--first-seed", "1")
    assert "pretrain: 2 runs, 2 to do" in capsys.readouterr().out  # where those of seed 0 have ended
    with pytest.raises(SystemExit):
        call(script, folder, "--dry-run", "--first-seed", "-1")
    assert "--first-seed must be at least 0, not -1" in capsys.readouterr().err


def test_models_are_what_export_writes(trained, script, folder, tmp_path):
    """The last model has the final weights of the run; the model after half of the tokens differs."""
    call(script, folder, "--stage", "pretrain", out="kept")
    for method in ("ma", "svgd"):
        export(folder / "kept" / "pretrain" / method / "seed-0", tmp_path / method)
        last, half = (folder / "kept" / "exports" / f"{method}-tiny" / "seed-0" / share for share in ("100", "050"))
        files = [path.relative_to(tmp_path / method) for path in (tmp_path / method).rglob("*") if path.is_file()]
        assert Path("model.safetensors") in files and Path("generator/model.safetensors") in files
        for name in files:
            assert (last / name).read_bytes() == (tmp_path / method / name).read_bytes()
        assert (half / "model.safetensors").read_bytes() != (last / "model.safetensors").read_bytes()
        assert (trained / last.relative_to(folder / "kept") / "vocab.txt").is_file()


def test_methods_differ_in_the_rule_alone(trained):
    ma, svgd = (RunFolder(trained / "pretrain" / method / "seed-0").recipe for method in ("ma", "svgd"))
    assert {key for key in ma if ma[key] != svgd[key]} == {"label", "method"}
    assert (ma["method"]["rule"], svgd["method"]["rule"]) == ("none", "svgd") and ma["training"]["epochs"] == 2


def test_every_fine_tuning_starts_from_its_model(trained):
    runs = {path.parent: RunFolder(path.parent).recipe for path in (trained / "finetune").rglob("result.json")}
    for path, recipe in runs.items():
        task, (method, _, share) = path.parts[-3], path.parts[-2].split("-")
        start = Path(recipe["model"]["start"])
        if task == "rte-mnli":
            assert start == trained / "finetune" / "mnli" / path.parts[-2] / path.name and share == "100"
        else:
            assert start == trained / "exports" / f"{method}-tiny" / "seed-0" / share
    count = {share: sum(path.parts[-2].endswith(share) for path in runs) for share in ("050", "100")}
    assert count == {"050": 2 * 4, "100": 2 * (4 * 2 + 2)}  # methods, tasks, repeats
    assert not list(trained.rglob("best")) and not list(trained.rglob("checkpoints"))


def test_what_is_there_is_not_made_again(trained, script, folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*.json")}
    call(script, folder, "--repeats", "2", "--stage", "pretrain", "finetune", "heads")
    printed = capsys.readouterr().out
    assert printed.count(" 0 to do") == 4 and before == {
        path: path.stat().st_mtime_ns for path in trained.rglob("*.json")
    }


def test_what_there_is_no_time_for_is_left(script, folder, capsys):
    call(script, folder, "--limit", "0", "--stage", "pretrain", "finetune", "heads", out="late")
    assert "pretrain: 0 s, 2 left" in capsys.readouterr().out and not list((folder / "late").rglob("result.json"))


def test_heads_are_measured_on_the_discriminator(trained):
    found = json.loads((trained / "heads" / "svgd-0-100.json").read_text())
    model = open_electra(trained / "exports" / "svgd-tiny" / "seed-0" / "100").eval()
    groups = find_heads(model.discriminator, layers="first")
    cosines = []
    for group in groups:
        units = torch.nn.functional.normalize(group.read().double(), dim=1)
        cosines.append(float((units @ units.T).fill_diagonal_(0).sum()) / 12)
    assert found["weights"][0]["cosine"] == pytest.approx(statistics.fmean(cosines), abs=1e-6)
    assert [len(found[space]) for space in ("weights", "attention", "outputs")] == [2, 2, 2]
    assert [(x["layer"], x["head"]) for x in found["without"]] == [(i, j) for i in range(2) for j in range(4)]
    assert found["blocks"] == 8 and any(x["nll"] != 0 for x in found["without"])


def test_tables_say_what_runs_came_to(trained, script, folder):
    call(script, folder, "--repeats", "2", "--stage", "tables")
    results = folder / "results"
    table = json.loads((results / "glue.json").read_text())
    metrics = {"cola": "matthews", "sts": "spearman", "mnli": "accuracy", "rte": "accuracy", "rte+mnli": "accuracy"}
    scores = {}
    for method in ("ma", "svgd"):
        for column, metric in metrics.items():
            place = trained / "finetune" / column.replace("rte+mnli", "rte-mnli") / f"{method}-0-100"
            values = [100 * RunFolder(place / f"seed-{seed}").metrics("test")[metric] for seed in (0, 1)]
            scores[method, column] = statistics.fmean(values)
            assert table["systems"][method]["cells"][column]["mean"] == pytest.approx(scores[method, column])
            assert table["systems"][method]["cells"][column]["deviation"] == pytest.approx(statistics.stdev(values))
        means = table["systems"][method]["means"]
        assert statistics.fmean(means["mean"].values()) == pytest.approx(
            statistics.fmean(scores[method, column] for column in TASKS)
        )
        assert len(means["mean, RTE from MNLI"]) == 2
    for column in metrics:
        found = table["against"]["svgd"][column]
        assert found["difference"] == pytest.approx(scores["svgd", column] - scores["ma", column])
        assert found["low"] <= found["difference"] <= found["high"] and found["seeds"] == 2
        assert found["over"] == ("seeds" if column == "sts" else "both")
    text = (results / "glue.md").read_text()
    assert "| system | CoLA | STS-B | MNLI | RTE | RTE from MNLI |" in text and "RMA (SVGD) minus MA:" in text

    curve = json.loads((results / "curve.json").read_text())
    for method in ("ma", "svgd"):
        assert [(point["tokens"], len(point["means"])) for point in curve[method]["points"]] == [(1000, 1), (2000, 2)]
        assert [tokens for tokens, _ in curve[method]["pretraining"]["auc"]["0"]] == [1024, 2048]
    assert (results / "curve.svg").read_text().startswith("<?xml") and (results / "pretraining-auc.svg").is_file()
    assert "| RMA (SVGD) | 2,000 | first |" in (results / "heads.md").read_text()
    assert set(json.loads((results / "heads.json").read_text())) == {
        f"{method}-0-{share}" for method in ("ma", "svgd") for share in ("050", "100")
    }


def test_blocks_are_shortened_and_packed(script, folder, tmp_path):
    from studies.pretraining import data as pretraining_data

    from repulsive.lab.systems.electra.blocks import Blocks

    whole = Blocks.load(folder / "data" / "pretrain")
    words = ("--blocks", folder / "data" / "pretrain", "--glue", folder / "data" / "glue" / "raw", "--out", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining_data, "TASKS", dict.fromkeys(TASKS))
        pretraining_data.main([*map(str, words), "--pieces", "310", "--archive", str(tmp_path / "all.tar.xz")])
    with tarfile.open(tmp_path / "all.tar.xz") as packed:
        packed.extractall(tmp_path / "there", filter="data")
    found = Blocks.load(tmp_path / "there" / "pretrain")  # which checks sums
    assert len(found.parts["train"]) == 10  # 310 / 32, rounded up
    assert torch.equal(found.parts["train"], whole.parts["train"][:10])
    assert torch.equal(found.parts["dev"], whole.parts["dev"]) and found.pieces.pieces == whole.pieces.pieces
    for task in TASKS:
        known = Prepared.load(folder / "data" / "glue" / task)
        assert Prepared.load(tmp_path / "there" / "glue" / task).manifest["files"] == known.manifest["files"]


def test_how_alike_tokens_are_is_measured(trained, script, folder):
    call(script, folder, "--repeats", "2", "--stage", "tables")
    found = json.loads((trained / "heads" / "svgd-0-100.json").read_text())["outputs"]
    rows = [line.split("|") for line in (folder / "results" / "heads.md").read_text().splitlines() if "| all |" in line]
    (last,) = (row[-2] for row in rows if row[1] == " RMA (SVGD) " and row[2] == " 2,000 ")
    assert float(last) == pytest.approx(statistics.fmean(layer["tokens"] for layer in found), abs=5e-4)


def test_fine_tunings_go_repeat_by_repeat_or_task_by_task(trained, script, folder, monkeypatch):
    """Both orders train the longest task first, and earlier models after the last one."""
    orders = {}
    for order in ("repeats", "tasks"):
        monkeypatch.setattr(script, "finetune", lambda study, limit, at=order: orders.update({at: listed(study)}))
        call(script, folder, "--repeats", "2", "--stage", "finetune", "--order", order)

    def place(task, name, seed):
        return f"{task}/{name}/seed-{seed}"

    models = ("ma-0-100", "svgd-0-100")
    from studies.pretraining import rows

    longest = [task for task in rows.LONGEST if task in TASKS]
    repeats = [place(task, name, seed) for seed in (0, 1) for task in longest for name in models]
    tasks = [place(task, name, seed) for task in longest for seed in (0, 1) for name in models]
    before = [place(task, name, 0) for task in longest for name in ("ma-0-050", "svgd-0-050")]
    assert orders == {"repeats": [*repeats, *before], "tasks": [*tasks, *before]} and longest[0] == "sts"


def listed(study):
    return ["/".join(spec.folder.parts[-3:]) for spec in study.fine_tunings(study.models())]


def test_a_collapse_stands_beside_the_scores(trained, script, folder, capsys):
    """If gradients vanish and the loss rises again, the table names the number of tokens at which it happened."""
    file = trained / "pretrain" / "svgd" / "seed-0" / "metrics.jsonl"
    result = file.with_name("result.json")
    kept, sealed = file.read_text(), result.read_text()
    seen = [(1, 9.0, 2e-2), (2, 5.0, 1e-2), *((step, 8.0, 1e-9 / step) for step in range(3, 8))]
    lines = []
    for step, loss, drive in seen:
        lines += [{"kind": "train", "step": step, "loss": loss}, {"kind": "heads", "step": step, "drive": drive}]
    try:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        unsealed = {key: value for key, value in json.loads(sealed).items() if key != "sha256"}
        result.write_text(json.dumps(unsealed))  # as folders of older versions are, which have no checksums
        call(script, folder, "--repeats", "2", "--stage", "tables")
    finally:
        file.write_text(kept)
        result.write_text(sealed)
    warning = "**RMA (SVGD), seed 0: the pre-training collapsed after 768 tokens.**"  # 3 steps of 8 x 32
    assert warning in capsys.readouterr().out and warning in (folder / "results" / "glue.md").read_text()
    assert json.loads((folder / "results" / "glue.json").read_text())["collapsed"] == {"svgd": {"0": 768}}
    call(script, folder, "--repeats", "2", "--stage", "tables")
    assert "collapsed" not in (folder / "results" / "glue.md").read_text()
    assert (folder / "results" / "pretraining-loss.svg").is_file()

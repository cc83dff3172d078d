"""Translation on the engine: the loss by hand, penalties, averaging, resuming, ablation, and that it learns."""

import json
import re
import signal
import subprocess
import sys

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import ConfigError, DataError, RunError
from repulsive.lab.engine import methods
from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.engine.loop import Loop, Stopped
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import as_markdown, rows
from repulsive.lab.runs.score import score
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.systems.translation.parallel import TAKEN
from repulsive.lab.text.pieces import BOS
from repulsive.regularizers import on_outputs, on_positions, on_subspaces
from tests.lab.engine import tiny
from tests.lab.systems import running
from tests.lab.systems.translation import digits
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits.make_data(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    return digits.train(data, tmp_path_factory.mktemp("run") / "seed-0")


def task_and_model(data, *more):
    task = make_task(digits.recipe(data, *more))
    torch.manual_seed(0)
    return task, task.model().double().eval()


def pairs(task, batch):
    """Source and target of each pair of a batch, as lists."""
    sides = task.parts["train"].sentences
    return [tuple(side[i].tolist() for side in sides) for i in batch.indices.tolist()]


# the loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_a_mean_over_tokens(smoothing, data):
    task, model = task_and_model(data, f"loss.label_smoothing={smoothing}")
    batch = task.order(0)[0]
    total, tokens = 0.0, 0
    for source, target in pairs(task, batch):  # one by one: no padding
        logits = model(torch.tensor([source]), torch.tensor([[BOS, *target[:-1]]]))[0]
        logs = logits.log_softmax(-1)
        own = logs[torch.arange(len(target)), target].sum()
        total += -(1 - smoothing) * own - smoothing * logs.mean(-1).sum()
        tokens += len(target)
    found = task.loss(model, task.fetch(batch), batch.length)
    assert found.item() == pytest.approx(total.item() / tokens, rel=1e-5)  # the loss is computed in float32


def test_processes_together_have_the_loss_of_one(data):
    task, model = task_and_model(data)
    batch = task.order(0)[1]
    whole = task.loss(model, task.fetch(batch), batch.length)
    split = 0.0
    for index in range(3):
        mine, count = rank_share(batch, index, 3)
        split += task.loss(model, task.fetch(mine), mine.length) * count / len(batch)
    assert split.item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "collect", "penalty"),
    [("outputs", "outputs", on_outputs), ("subspaces", "values", on_subspaces), ("positions", "weights", on_positions)],
)
def test_the_penalty_is_that_of_the_tokens_alone(kind, collect, penalty, data):
    """Against the same, pair by pair without padding, weighted by their lengths."""
    plain, model = task_and_model(data)
    task, _ = task_and_model(data, "method.penalty=0.5", f"loss.penalty_on={kind}")
    batch = task.order(0)[0]
    sums, weights = [0.0, 0.0, 0.0], [0, 0, 0]  # encoder, decoder, cross
    for source, target in pairs(task, batch):
        _, seen = model(torch.tensor([source]), torch.tensor([[BOS, *target[:-1]]]), collect=collect)
        lengths = [len(source), len(target), len(source) if kind == "subspaces" else len(target)]
        for i, (x, n) in enumerate(zip(seen, lengths, strict=True)):
            sums[i] += penalty(x).item() * n
            weights[i] += n
    expected = 0.5 * sum(s / w for s, w in zip(sums, weights, strict=True)) / 3
    losses = [each.loss(model, each.fetch(batch), batch.length).item() for each in (task, plain)]
    assert losses[0] - losses[1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("penalty", ["outputs", "subspaces", "positions", ""])
def test_the_loss_never_waits_for_the_device(penalty, data):
    more = ("method.penalty=0.5", f"loss.penalty_on={penalty}") if penalty else ()
    running.check_the_loss_never_waits(make_task(digits.recipe(data, *more)))


# training


def test_it_learns_to_translate(data, tmp_path):
    made = digits.train(data, tmp_path / "run", "training.epochs=10", "training.batch=128", "model.dropout=0")
    result = made.folder.result
    assert result["test"]["bleu"] > 80 and result["test"]["accuracy"] > 0.9
    losses = [line["nll"] for line in made.folder.lines() if line["kind"] == "dev"]
    assert len(losses) == 10 and losses[-1] < 0.3 < losses[0]


def test_what_a_run_leaves(trained):
    result, lines = trained.folder.result, trained.folder.lines()
    looks = [line for line in lines if line["kind"] == "dev"]
    assert all("nll" in line and "bleu" not in line for line in looks)  # looks do not translate
    for part in ("dev", "test"):
        found, items = result[part], trained.folder.items(part)
        assert {"bleu", "sacrebleu", "chrf", "nll", "accuracy", "perplexity"} <= set(found)
        assert found["log_likelihood"] == -found["nll"] and trained.task.select_by == "log_likelihood"
        assert float(items["nll"].mean()) == pytest.approx(found["nll"])
        assert float(items["correct"].mean()) == pytest.approx(found["accuracy"])
        assert items["bleu_statistics"].shape == (20, 10) and len(items["hypotheses"]) == 20
    assert "tok:13a" in result["notes"]["sacrebleu"] and "tok:none" in result["notes"]["bleu"]
    assert result["averaged"] == 2 and result["best_step"] == result["steps"]


class Keeper(Watcher):
    """Keeps the weights at every look."""

    def __init__(self):
        self.weights = []

    def logged(self, kind, step, values):
        if kind == "dev":
            self.weights.append({name: x.clone() for name, x in self.loop.bare.state_dict().items()})


@pytest.mark.parametrize(("more", "taken"), [([], 2), (["training.average=7"], 3)])
def test_the_last_weights_are_averaged(more, taken, data, tmp_path):
    keeper = Keeper()
    keeper.loop = made = digits.loop(data, tmp_path, *more, watcher=keeper)
    made.run()
    made.folder.close()
    best = made.folder.best.latest()[1]["model"]
    assert len(keeper.weights) == 3 and made.folder.result["averaged"] == taken
    for name, weight in best.items():
        assert torch.allclose(weight, torch.stack([w[name] for w in keeper.weights[-taken:]]).mean(0), atol=1e-7)
    assert any(not torch.allclose(best[name], keeper.weights[-1][name], atol=1e-4) for name in best)


@pytest.mark.parametrize("stop", [3, 18])
def test_stopped_before_or_amid_the_average_the_same_comes_out(stop, data, tmp_path):
    """Averaged are the weights of the last step and of two, four and six steps before it."""
    more = ("training.average=4", "training.average_every=2", "training.log_every=1")
    whole = digits.train(data, tmp_path / "whole", *more)
    assert whole.total == 21  # so 15, 17, 19 and 21
    with pytest.raises(Stopped):
        digits.train(data, tmp_path / "parts", *more, watcher=tiny.At(stop, tiny.signalled(signal.SIGTERM)))
    digits.train(data, tmp_path / "parts", *more)
    tiny.assert_same(tmp_path / "parts", tmp_path / "whole")


def test_runs_are_compared_by_bleu_too(trained, data, tmp_path):
    other = digits.train(data, tmp_path / "other", "training.epochs=1", "label=short")
    found = rows([trained.folder.path, other.folder.path])
    difference = other.folder.result["test"]["bleu"] - trained.folder.result["test"]["bleu"]
    assert found[1].against["bleu"].difference == pytest.approx(difference, abs=1e-6)
    assert set(found[1].against) == {"bleu", "accuracy", "nll"}
    assert as_markdown(found).startswith("| method | seeds | bleu | sacrebleu | chrf | accuracy | nll |")
    (again,) = score([trained.folder.path], "test", device="cpu")
    assert again.cells["bleu"].mean == pytest.approx(trained.folder.result["test"]["bleu"])
    (own,) = score([trained.folder.path], "train", device="cpu")
    assert "bleu" not in own.cells and own.cells["nll"].mean > 0


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    """A run on a folder with two further test sets: the test set itself, and the development set."""
    folder = digits.make_data(tmp_path_factory.mktemp("further"), again="test", other="valid")
    return digits.train(folder, folder / "run")


def test_further_test_sets_are_scored_as_the_test_set_is(further, trained):
    result, plain = further.folder.result, trained.folder.result
    assert result["again"] == result["test"] and result["other"] == result["dev"]
    assert {part: result[part] for part in ("dev", "test")} == {part: plain[part] for part in ("dev", "test")}
    assert set(result) - set(plain) == {"again", "other"} and result["notes"] == plain["notes"]
    items, known = further.folder.items("again"), further.folder.items("test")
    assert items.keys() == known.keys() and all(torch.equal(items[name], known[name]) for name in known)


def test_no_further_test_set_takes_the_place_of_something_else(further):
    """A result has parts beside other entries, and a run folder files beside those of the parts."""
    assert set(further.folder.result) - set(TAKEN) == {"again", "other"}


def test_runs_are_compared_on_a_further_test_set(further, tmp_path):
    data = further.folder.path.parent
    short = digits.train(data, tmp_path / "short", "training.epochs=1", "label=short")
    folders = [further.folder.path, short.folder.path]
    found, known = rows(folders, "again"), rows(folders, "test")
    assert found[1].against == known[1].against and set(found[1].against) == {"bleu", "accuracy", "nll"}
    assert rows(folders, "other")[1].against["nll"] != known[1].against["nll"]
    again = score(folders, "again", device="cpu")
    assert again[1].against["nll"].difference == pytest.approx(found[1].against["nll"].difference, abs=1e-6)


def test_a_part_that_a_run_does_not_have(further, trained, capsys):
    folders = [further.folder.path, trained.folder.path]
    with pytest.raises(RunError, match=r"seed-0: was not evaluated on part 'again'; it was on dev, test$"):
        rows(folders, "again")
    words = ["evaluate", *map(str, folders), "--part", "again", "--device", "cpu"]
    assert run(words) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "part 'again'" in output.err and "choose one of train, dev, test" in output.err
    # with the data of the other run, which has the same pieces, it can be evaluated
    assert run([*words, "--data", str(further.folder.path.parent / "prepared")]) == 0
    assert re.search(r"^digits \(seed-0\) +1 .*\+0\.000 \(p 1\.000\)$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ([], 3 * 3 * 2),
        (["method.where=encoder"], 3 * 2),
        (["method.where=cross", "method.parts=q"], 2),
        (["method.parts=kv", "method.layers=last"], 2 * 3),
        (["method.layers=[0]", "method.where=decoder"], 3),
    ],
)
def test_the_module_ablation(changes, groups, data):
    recipe = digits.recipe(data, "model.depth=[2, 2]", "method.rule=svgd", *changes)
    model = make_task(recipe).model()
    handle = methods.attach(
        model, torch.optim.Adam(model.parameters()), recipe, methods.make_rule(recipe.method, 100, 10)
    )
    assert len(handle.report()) == groups


@pytest.mark.parametrize("rule", ["svgd", "spos", "sgld", "sgld-tempered", "spos-tempered"])
def test_every_rule_trains(rule, data, tmp_path):
    made = open_recipe(f"multi30k/{rule}").method
    keys = ["rule", "stepsize", "alpha", "temperature"]
    if rule.endswith("-tempered"):
        keys += ["beta", "noise", "noise_in"]
    changes = [f"method.{key}={json.dumps(getattr(made, key))}" for key in keys]
    found = digits.train(data, tmp_path, "training.epochs=1", *changes)
    assert found.folder.result["test"]["nll"] < 4.8  # log 120 and more at the start


@pytest.mark.slow
def test_two_processes_train_as_one(data, tmp_path):
    """The loss is a mean over all tokens of a batch, whoever has them: the same losses, step by step."""
    words = ["train", str(digits.toml(data)), "--set", "model.dropout=0", "--device", "cpu", "--quiet", "--out"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for start, out in ((tiny.command(), "one"), ([*launch, "repulsive"], "two")):
        subprocess.run([*start, *words, str(tmp_path / out)], env=tiny.environment(), check=True, capture_output=True)
    one, two = (RunFolder(next((tmp_path / out).glob("*/seed-0"))).lines() for out in ("one", "two"))
    assert len(one) == len(two) > 6
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_captured_training_is_the_same_training(penalty, data, tmp_path):
    """No dropout: the loss of every step, with graphs of several shapes and without any."""
    more = (f"method.penalty={penalty}", "model.dropout=0", "training.log_every=1", "training.tf32=false")
    losses = []
    for capture in ("true", "false"):
        recipe = digits.recipe(data, *more, "training.epochs=6", f"training.capture={capture}")
        made = Loop(make_task(recipe), recipe, RunFolder(tmp_path / capture), Watcher(), "cuda")
        made.run()
        made.folder.close()
        losses.append([line["loss"] for line in made.folder.lines() if line["kind"] == "train"])
        assert capture == "false" or len(made._gradients.captured._graphs) >= 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


# mistakes


def test_mistakes(data, tmp_path):
    for change, message in (
        ("model.heads=5", "width=32 does not divide into heads=5"),
        ("model.depth=[0, 1]", "depth must be at least 1"),
        ("search.beam=0", "beam=0 must be at least 1"),
        ("search.longest=2000", "longest=2000 must be 1000 at most"),
        ("loss.label_smoothing=1.0", "label_smoothing=1.0"),
        ("loss.penalty_on=weights", "must be one of outputs, subspaces, positions"),
        ("training.average=-1", "average=-1 must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            digits.recipe(data, change)


def test_a_missing_package_is_told_before_training(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataError, match="BLEU needs the package sacrebleu"):
        make_task(digits.recipe(data))


def test_a_folder_of_another_task_is_refused(data, tmp_path):
    tiny.make_data(tmp_path / "reviews")
    with pytest.raises(DataError, match="is dataset 'reviews', not translation"):
        make_task(digits.recipe(data, f"data.folder={tmp_path / 'reviews'}"))
    assert RunFolder(tmp_path / "none").result is None

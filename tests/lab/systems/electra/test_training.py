"""Pre-training on the engine: order, learning, resuming, repelled heads, metrics, and the settings of the paper."""

import dataclasses
import math
import signal
import subprocess
import sys

import pytest
import torch

from repulsive.lab.engine.loop import Loop, Stopped
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import rows
from repulsive.lab.runs.score import score
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.metrics.auc import auc
from tests.lab.engine import tiny
from tests.lab.systems.electra import words
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


def test_a_pass_has_every_block_once(data):
    task = make_task(words.recipe(data))
    first, second = ([i for batch in task.order(epoch) for i in batch.indices.tolist()] for epoch in (0, 1))
    assert len(first) == len(set(first)) == len(task.order(0)) * 16 and task.blocks - len(first) < 16
    assert first != second and first == [i for b in task.order(0) for i in b.indices.tolist()]


def test_epochs_of_so_many_steps_go_on_through_the_passes(data):
    plain, cut = make_task(words.recipe(data)), make_task(words.recipe(data, "data.steps=7"))
    whole = [b.indices.tolist() for epoch in range(2) for b in plain.order(epoch)]
    found = [b.indices.tolist() for epoch in range(len(whole) // 7) for b in cut.order(epoch)]
    assert len(cut.order(3)) == 7 and found == whole[: len(found)]
    assert [b.indices.tolist() for b in cut.order(1)[5:]] == whole[12:14]
    assert cut.order(1)[-1].indices.tolist() == whole[13]


@pytest.mark.slow
def test_it_learns(data, tmp_path):
    more = ["optimizer.bias_correction=true", "optimizer.lr=2e-3", "method.rule=none", "training.evaluate_every=150"]
    more += ["model.dropout=0", "model.width=64", "model.embedding=64", "data.steps=300", "training.epochs=1"]
    made = words.train(data, tmp_path / "run", *more)
    found = made.folder.result["test"]
    assert found["generator_nll"] < 2.6  # 3.2 for who knows how often each word occurs
    assert found["auc"] > 0.57 and found["found"] > 0.02
    assert found["nll"] < 0.33  # 0.35 for who knows how many are replaced


@pytest.mark.parametrize("more", [(), ("objective=bert",), ("data.steps=9",)])
def test_stopped_amid_an_epoch_the_same_comes_out(more, data, tmp_path):
    words.train(data, tmp_path / "whole", *more)
    with pytest.raises(Stopped):
        words.train(data, tmp_path / "parts", *more, watcher=tiny.At(5, tiny.signalled(signal.SIGTERM)))
    words.train(data, tmp_path / "parts", *more)
    tiny.assert_same(tmp_path / "parts", tmp_path / "whole")


def test_heads_of_the_discriminator_alone_are_repelled(data, tmp_path):
    made = words.loop(data, tmp_path)
    made._build()
    assert [(r.part, r.layer, r.num_heads) for r in made.handle.report()] == [("q", 0, 4), ("k", 0, 4), ("v", 0, 4)]
    own = made.bare.discriminator.electra.encoder.layer[0].attention.self
    found = [p for group in made.handle.groups for p in group.parameters()]
    assert all(a is b for a, b in zip(found, (own.query.weight, own.key.weight, own.value.weight), strict=True))
    made.folder.close()


def test_what_a_run_leaves(trained):
    result = trained.folder.result
    for part in ("dev", "test"):
        found, items = result[part], trained.folder.items(part)
        assert found["loss"] == pytest.approx(found["generator_nll"] + 50 * found["nll"])
        assert found["log_likelihood"] == -found["loss"] and 0 < found["replaced"] < 0.15
        assert float(items["nll"].mean()) == pytest.approx(found["nll"])
        assert float(items["correct"].mean()) == pytest.approx(found["accuracy"])
    assert result["averaged"] == 1 and result["best_step"] == result["steps"]
    (again,) = score([trained.folder.path], "test", device="cpu")
    assert again.cells["auc"].mean == pytest.approx(result["test"]["auc"])  # the same masks, the same samples


def test_runs_are_compared_block_by_block(trained, data, tmp_path):
    other = words.train(data, tmp_path / "other", "training.epochs=1", "method.rule=none", "label=MA")
    found = rows([other.folder.path, trained.folder.path])
    difference = trained.folder.result["test"]["nll"] - other.folder.result["test"]["nll"]
    assert found[1].against["nll"].difference == pytest.approx(difference, abs=1e-6)


def test_area_under_the_curve():
    torch.manual_seed(0)
    scores, labels = torch.randint(0, 20, (300,)).float(), torch.rand(300) < 0.3
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels].tolist() for n in scores[~labels].tolist()]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(scores, scores > 7) == 1 and math.isnan(auc(scores, scores > 100))


def test_the_paper_s_settings():
    plain, svgd = open_recipe("electra/small-ma"), open_recipe("electra/small-svgd")
    assert (svgd.method.stepsize, svgd.method.alpha, svgd.method.layers) == (0.01, 0.1, "first")
    assert open_recipe("electra/small-strided").method == dataclasses.replace(svgd.method, layout="strided")
    assert open_recipe("electra/tiny-strided").method == open_recipe("electra/small-strided").method
    for size in ("small", "tiny"):  # what remains of the published rule without its force
        smoothed, scaled = (open_recipe(f"electra/{size}-control-{how}").method for how in ("smoothed", "scaled"))
        assert smoothed == dataclasses.replace(svgd.method, alpha=0.0)
        assert scaled == dataclasses.replace(smoothed, smoothing=0.0)
    assert open_recipe("electra/tiny-svgd-sphere").method == open_recipe("electra/small-svgd-sphere").method
    assert plain.data.steps * plain.training.epochs == 1_000_000 and plain.optimizer.clip == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("objective=bert",), ("training.compile=true",)])
@pytest.mark.parametrize("packing", ["full", "official"])
def test_captured_training_learns_the_same(packing, more, data, padded, tmp_path):
    """Masks are drawn on the device, in a graph as without: not the same ones, so losses agree on average only."""
    losses = []
    for capture in ("true", "false"):
        changes = (*more, "model.dropout=0", f"training.capture={capture}", "training.epochs=6", "method.rule=none")
        recipe = words.recipe(data if packing == "full" else padded, *changes)
        made = Loop(make_task(recipe), recipe, RunFolder(tmp_path / capture), Watcher(), "cuda")
        made.run()
        made.folder.close()
        losses.append(made.folder.result["test"]["loss"])
        assert capture == "false" or len(made._gradients.captured._graphs) == 1
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.slow
def test_two_processes_train(data, tmp_path):
    """Masks differ from process to process, so it is no training of one; it falls as far."""
    words_of = ["train", str(words.toml(data)), "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "repulsive"]
    subprocess.run([*launch, *words_of], env=tiny.environment(), check=True, capture_output=True)
    losses = [line["loss"] for line in RunFolder(next(tmp_path.glob("*/seed-0"))).lines() if line["kind"] == "train"]
    assert len(losses) > 4 and losses[-1] < 36 < losses[0]  # 38.1 at the start

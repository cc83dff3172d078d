"""Pre-training on the engine: the loss by hand, order, resuming, heads, export and going on, and that it learns."""

import dataclasses
import math
import signal
import subprocess
import sys

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import ConfigError, DataError, RunError
from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.engine.loop import Loop, Stopped
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import rows
from repulsive.lab.runs.export import export
from repulsive.lab.runs.score import load_run, score
from repulsive.lab.systems.electra.blocks import unpack
from repulsive.lab.systems.electra.loss import total_loss
from repulsive.lab.systems.electra.model import open_electra, open_masked
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.folders import read_manifest
from repulsive.metrics.auc import auc
from tests.lab.engine import tiny
from tests.lab.systems import running
from tests.lab.systems.electra import words
from tests.threads import one_thread  # noqa: F401  an autouse fixture

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return words.make_data(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    return words.make_data(tmp_path_factory.mktemp("padded"), packing="official")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    return words.train(data, tmp_path_factory.mktemp("run") / "seed-0", "training.epochs=1")


def task_and_model(data, *more):
    task = make_task(words.recipe(data, *more))
    torch.manual_seed(0)
    return task, task.model().eval()


# the loss


@pytest.mark.parametrize("objective", ["electra", "bert"])
@pytest.mark.parametrize("packing", ["full", "official"])
def test_the_loss_by_hand(packing, objective, data, padded):
    """Block by block and place by place, without padding, with transformers' own forward passes."""
    task, model = task_and_model(data if packing == "full" else padded, f"objective={objective}")
    batch = task.order(0)[0]
    table = task.parts["train"][batch.indices]
    torch.manual_seed(7)
    tokens, types, seen, masked = task._masked(table, 32)
    logits, corrupted, _ = task._predict(model, tokens, types, seen, masked)
    guessed, detected, places, pieces = 0.0, 0.0, 0, 0
    for row, (end, middle) in enumerate(zip(unpack(table, 32)[2].tolist(), unpack(table, 32)[1].tolist(), strict=True)):
        kinds = torch.tensor([[0] * middle + [1] * (end - middle)])
        network = model.generator if objective == "electra" else model.network
        logs = network(masked.tokens[row : row + 1, :end], token_type_ids=kinds).logits[0].log_softmax(-1)
        for place, counts in zip(masked.places[row].tolist(), masked.counts[row].tolist(), strict=True):
            guessed -= counts * logs[place, tokens[row, place]].item()
            places += counts
        pieces += end
        if objective == "electra":
            said = model.discriminator(corrupted[row : row + 1, :end], token_type_ids=kinds).logits[0]
            for x, was, is_now in zip(said.tolist(), tokens[row].tolist(), corrupted[row].tolist(), strict=False):
                p = 1 / (1 + math.exp(-x))
                detected -= math.log(p if was != is_now else 1 - p)
    expected = guessed / places + 50 * detected / pieces
    torch.manual_seed(7)
    assert task.loss(model, task.fetch(batch), 32).item() == pytest.approx(expected, rel=1e-4)
    assert logits.shape[:2] == masked.places.shape and (packing == "full") == (seen is None)


def test_processes_together_have_the_loss_of_one(padded, monkeypatch):
    """Sums are over the whole batch's pieces and places, whoever has them."""
    task, model = task_and_model(padded)
    batch = task.order(0)[1]
    assert batch.means is not None and float(batch.means[0]) < 32

    def fixed(rows, length, draw=None):  # masks and samples that are functions of the block alone
        found = original(rows, length, torch.Generator().manual_seed(3))
        ends = unpack(rows, length)[2]
        last = (ends - 2).unsqueeze(1).expand(-1, found[3].places.shape[1]) * (found[3].counts > 0)
        answers = found[0].gather(1, last)
        return *found[:3], dataclasses.replace(found[3], tokens=found[0], places=last, answers=answers)

    original = task._masked
    monkeypatch.setattr(task, "_masked", fixed)
    monkeypatch.setattr("repulsive.lab.systems.electra.model.sample", lambda logits, draw=None: logits.argmax(-1))
    whole = task.loss(model, task.fetch(batch), 32)
    split = 0.0
    for index in range(3):
        mine, count = rank_share(batch, index, 3)
        split += task.loss(model, task.fetch(mine), 32) * count / len(batch)
    assert split.item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["electra", "bert"])
@pytest.mark.parametrize("packing", ["full", "official"])
def test_the_loss_never_waits_for_the_device(packing, objective, data, padded):
    running.check_the_loss_never_waits(
        make_task(words.recipe(data if packing == "full" else padded, f"objective={objective}"))
    )


def test_blocks_from_the_memory_map_are_the_same(data, monkeypatch):
    task, model = task_and_model(data)
    monkeypatch.setattr("repulsive.lab.systems.electra.task._ON_DEVICE", 0)
    other, _ = task_and_model(data)
    assert other.fetch(other.order(0)[0]).keys() == {"rows"}
    losses = []
    for each in (task, other):
        each.to(torch.device("cpu"))
        torch.manual_seed(1)
        losses.append(each.loss(model, each.fetch(each.order(0)[0]), 32).item())
    assert losses[0] == losses[1]


# order


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


# training


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


# export, and going on from there


def test_an_exported_model_says_the_same(trained, tmp_path, capsys):
    out = tmp_path / "exported"
    assert run(["export", str(trained.folder.path), "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}\n{out / 'generator'}\n", "")
    _, model = load_run(trained.folder, torch.device("cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    inputs = tokenizer(["Kara kasi kato.", "Losi"], ["lora lovu", "Mira mize misi."], padding=True, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0][:6]).split() == ["[CLS]", "kara", "kasi", "kato.", "[SEP]"]
    read = {
        transformers.ElectraForPreTraining.from_pretrained(out): model.discriminator,
        transformers.AutoModelForMaskedLM.from_pretrained(out / "generator"): model.generator,
        transformers.AutoModel.from_pretrained(out): model.discriminator.electra,
    }
    for found, own in read.items():
        assert found.state_dict().keys() == own.state_dict().keys()
        assert all(torch.equal(x, own.state_dict()[name]) for name, x in found.state_dict().items())
        with torch.no_grad():  # sums may be in another order, where weights lie elsewhere in memory
            assert torch.allclose(found.eval()(**inputs)[0], own(**inputs)[0], atol=1e-6)
    assert len({path.stat().st_mode for path in out.rglob("*") if path.is_file()}) == 1  # as the umask gives
    capsys.readouterr()
    assert run(["export", str(trained.folder.path), "--out", str(out)]) == 2
    output = capsys.readouterr().err
    assert "exists already" in output and output.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"exported"}


def test_training_goes_on_from_a_folder(trained, data, tmp_path):
    out = tmp_path / "exported"
    export(trained.folder.path, out)
    recipe = words.recipe(data, f'model.start="{out}"', "training.epochs=1")
    task = make_task(recipe)
    _, model = load_run(trained.folder, torch.device("cpu"))
    found = task.model()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    assert found.generator.generator_lm_head.weight is found.discriminator.electra.embeddings.word_embeddings.weight
    assert {"start/model.safetensors", "start/generator/config.json"} <= set(task.checksums)
    result = words.train(data, tmp_path / "run", f'model.start="{out}"', "training.epochs=1").folder.result
    assert result["test"]["loss"] < trained.folder.result["test"]["loss"]
    (out / "generator").rename(tmp_path / "elsewhere")
    alone = open_electra(out, 0.5)
    assert alone.generator.config.hidden_size == 16
    assert torch.equal(
        alone.discriminator.electra.encoder.layer[0].attention.self.query.weight,
        model.discriminator.electra.encoder.layer[0].attention.self.query.weight,
    )


def small_bert(pieces):
    return transformers.BertConfig(
        vocab_size=pieces,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )


def test_masked_language_modelling_goes_on_from_bert(data, tmp_path):
    pieces = len((data / "vocab.txt").read_text().splitlines())
    bert = transformers.BertForMaskedLM(small_bert(pieces))
    bert.save_pretrained(tmp_path / "bert")
    task = make_task(words.recipe(data, "objective=bert", f'model.start="{tmp_path / "bert"}"'))
    model, batch = task.model(), task.order(0)[0]
    _, types, seen, masked = task._masked(task.parts["train"][batch.indices], 32)
    expected = bert.eval()(masked.tokens, token_type_ids=types).logits
    logits = model.eval()(masked.tokens, types, masked.places, seen)
    assert torch.allclose(logits, expected.gather(1, masked.places.unsqueeze(-1).expand_as(logits)), atol=1e-5)
    made = words.train(data, tmp_path / "run", "objective=bert", f'model.start="{tmp_path / "bert"}"')
    export(made.folder.path, tmp_path / "exported")
    assert isinstance(open_masked(tmp_path / "exported").network, transformers.BertForMaskedLM)


def test_a_corpus_too_small_to_train_on_can_be_evaluated(trained, tmp_path):
    data = words.make_data(tmp_path / "small", documents=15, dev=0.4)
    with pytest.raises(ConfigError, match="blocks to train on; lower it"):
        make_task(words.recipe(data)).order(0)
    (row,) = score([trained.folder.path], "test", data / "prepared", "cpu")
    assert 0 < row.cells["nll"].mean < 9


# mistakes


def test_mistakes(data, trained, tmp_path):
    for change, message in (
        ("model.heads=5", "width=32 does not divide into heads=5"),
        ("model.generator=0", "generator=0.0 must lie between 0 and 1"),
        ("model.layers=0", "must be at least 1"),
        ("loss.masked=0", "masked lie between"),
        ("data.share=0", "share=0.0"),
        ("data.steps=-1", "steps=-1"),
        ("method.penalty=1", "no regularizer"),
        ("objective=gpt", "must be one of electra, bert"),
    ):
        with pytest.raises(ConfigError, match=message):
            words.recipe(data, change)
    with pytest.raises(ConfigError, match=r"training.batch=9999: .* blocks to train on"):
        make_task(words.recipe(data, "training.batch=9999")).order(0)
    with pytest.raises(DataError, match=r"none: no config.json"):
        make_task(words.recipe(data, f'model.start="{tmp_path / "none"}"')).model()
    transformers.BertForMaskedLM(small_bert(7)).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="has 7 pieces"):
        make_task(words.recipe(data, "objective=bert", f'model.start="{tmp_path / "other"}"')).model()
    tiny.make_data(tmp_path / "reviews")
    with pytest.raises(DataError, match="is dataset 'reviews', not 'pretrain'"):
        make_task(words.recipe(data, f"data.folder={tmp_path / 'reviews'}"))
    with pytest.raises(RunError, match="is not a run folder"):
        export(tmp_path, tmp_path / "out")
    assert read_manifest(data / "prepared")["task"] == "pretrain"


def test_a_run_of_another_task_or_one_that_has_not_ended_is_not_exported(data, tmp_path):
    reviews = tiny.make_data(tmp_path / "reviews")
    other = tiny.train(reviews, tmp_path / "other")
    with pytest.raises(RunError, match="is a run of classification"):
        export(other.path, tmp_path / "out")
    with pytest.raises(Stopped):
        words.train(data, tmp_path / "half", watcher=tiny.At(5, tiny.signalled(signal.SIGTERM)))
    with pytest.raises(RunError, match="has not finished"):
        export(tmp_path / "half", tmp_path / "out")


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
@pytest.mark.parametrize("packing", ["full", "official"])
def test_compiled_masks_and_losses_are_of_the_same_kind(packing, data, padded):
    """Compilers draw other numbers: what must hold of any draw holds, and the loss of it is what eager code makes."""
    task, model = task_and_model(data if packing == "full" else padded, "training.compile=true")
    batch = task.order(0)[0]
    rows = task.parts["train"][batch.indices]
    tokens, types, seen, masked = task._masked(rows, 32)
    marks = torch.tensor([task.marks[name] for name in ("PAD", "CLS", "SEP")])
    counted = masked.counts.bool()
    assert torch.equal(masked.answers, tokens.gather(1, masked.places)) and bool(counted.any())
    assert not torch.isin(masked.answers[counted], marks).any() and bool((masked.tokens != tokens).any())
    assert (seen is None) == (packing == "full") and types.shape == tokens.shape
    said = task._predict(model, tokens, types, seen, masked)
    numbers = torch.tensor(70.0), torch.tensor(500.0), 50.0
    given = *said, tokens, masked.answers, masked.counts, seen, *numbers
    assert task._total_loss(*given).item() == pytest.approx(total_loss(*given).item(), rel=1e-5)


@pytest.mark.slow
def test_two_processes_train(data, tmp_path):
    """Masks differ from process to process, so it is no training of one; it falls as far."""
    words_of = ["train", str(words.toml(data)), "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "repulsive"]
    subprocess.run([*launch, *words_of], env=tiny.environment(), check=True, capture_output=True)
    losses = [line["loss"] for line in RunFolder(next(tmp_path.glob("*/seed-0"))).lines() if line["kind"] == "train"]
    assert len(losses) > 4 and losses[-1] < 36 < losses[0]  # 38.1 at the start

"""Texts from graphs on the engine: the loss by hand, penalties, that it learns, what a run leaves, mistakes."""

import pytest
import torch

from repulsive.errors import ConfigError, DataError
from repulsive.heads import find_heads
from repulsive.lab.engine import methods
from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.engine.tables import rows
from repulsive.lab.layers import lstm
from repulsive.lab.runs.score import score
from repulsive.lab.systems.graphs import model as graph_writer
from repulsive.lab.systems.graphs.batches import GraphBuckets
from repulsive.lab.systems.graphs.metrics import bleu
from repulsive.lab.systems.graphs.prepare import plan_graphs
from repulsive.lab.systems.graphs.prepared import WORD
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.pieces import BOS
from repulsive.metrics.bleu import bleu_of
from repulsive.regularizers import cosine
from tests.lab.systems import running
from tests.lab.systems.graphs import toy_graphs
from tests.lab.systems.graphs.graph_files import write_tsv
from tests.threads import one_thread  # noqa: F401  an autouse fixture


@pytest.fixture(scope="module", autouse=True)
def without_java():
    """METEOR's program takes seconds for every evaluation, and is no part of what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repulsive.lab.systems.graphs.meteor.official_program", lambda: None)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy_graphs.make_data(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    return toy_graphs.train(data, tmp_path_factory.mktemp("run") / "seed-0", "training.epochs=8")


def task_and_model(data, *more):
    task = make_task(toy_graphs.recipe(data, *more))
    torch.manual_seed(0)
    return task, task.model().double().eval()


def alone(task, part, text):
    """One text as the prepared data have it, without padding: what the model is given, target numbers, copies."""
    graph = int(torch.searchsorted(part.texts, text, right=True)) - 1
    entities = [part.entities[i].long() for i in range(*part.types.offsets[graph : graph + 2].tolist())]
    table = torch.nn.utils.rnn.pad_sequence(entities, True)[None]
    words, copies = part.targets[text].long(), part.copies[text].long()
    before = torch.cat([torch.tensor([BOS]), words[:-1]])[None]
    target = torch.where(copies == WORD, words, len(task.data.vocabularies.words) + copies)
    return (None, table, part.relations[graph].long()[None], before), target, graph


# the loss


def test_the_loss_is_a_mean_over_words(data):
    task, model = task_and_model(data)
    batch = task.order(0)[0]
    total, count, copied = 0.0, 0, 0
    for text in batch.indices.tolist():
        given, target, _ = alone(task, task.data.parts["train"], text)
        logs = model(*given)[0]
        total -= logs[torch.arange(len(target)), target].sum().item()
        count += len(target)
        copied += int((target >= len(task.data.vocabularies.words)).sum())
    assert copied > len(batch)  # both kinds of targets are there
    found = task.loss(model, task.fetch(batch), batch.length)
    assert found.item() == pytest.approx(total / count, rel=1e-6)


def test_coverage_asks_for_each_entity_once(data):
    plain, model = task_and_model(data)
    task, _ = task_and_model(data, "loss.coverage=0.5")
    batch, words = task.order(0)[0], len(task.data.vocabularies.words)
    terms = []
    for text in batch.indices.tolist():
        given, _, _ = alone(task, task.data.parts["train"], text)
        most = model(*given)[0, :, words:].exp().amax(0)  # [E]
        terms.append((1 - most).square().mean())
    losses = [each.loss(model, each.fetch(batch), batch.length).item() for each in (task, plain)]
    assert losses[0] - losses[1] == pytest.approx(0.5 * torch.stack(terms).mean().item(), rel=1e-5)


def test_the_penalty_is_the_cosine_of_encoder_heads(data):
    plain, model = task_and_model(data)
    task, _ = task_and_model(data, "method.penalty=0.3")
    batch = task.order(0)[0]
    groups = [group.read() for group in find_heads(model) if group.where == "encoder"]
    losses = [each.loss(model, each.fetch(batch), batch.length).item() for each in (task, plain)]
    assert losses[0] - losses[1] == pytest.approx(0.3 * cosine(torch.stack(groups)).item(), rel=1e-5)


def test_processes_together_have_the_loss_of_one(data):
    task, model = task_and_model(data, "loss.coverage=0.5")
    batch = task.order(0)[1]
    whole, split = task.loss(model, task.fetch(batch), batch.length), 0.0
    for index in range(3):
        mine, count = rank_share(batch, index, 3)
        split += task.loss(model, task.fetch(mine), mine.length) * count / len(batch)
    assert split.item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("more", [(), ("method.penalty=0.5", "loss.coverage=0.5")])
def test_the_loss_never_waits_for_the_device(more, data, monkeypatch):
    # Autocast does not know the device "meta".
    monkeypatch.setattr(graph_writer, "two_way", lstm._by_modules)
    running.check_the_loss_never_waits(make_task(toy_graphs.recipe(data, *more)))


def test_batches_have_few_shapes_and_every_text_once(data):
    task = make_task(toy_graphs.recipe(data))
    batches, texts = task.order(3), task.parts["train"].targets
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == list(range(len(texts)))
    assert len({batch.length for batch in batches}) <= len(task._batches.shapes) <= 4
    for batch in batches:
        length, shape = task._batches.shapes[batch.length]
        sizes = task._sizes["train"][task._graphs["train"][batch.indices]].amax(0)
        assert all(need <= bound for need, bound in zip(sizes.tolist(), shape, strict=True))
        assert int(texts.lengths[batch.indices].max()) <= length


def test_long_names_widen_only_their_own_batches():
    lengths, words = torch.full((64,), 5), torch.tensor([2] * 60 + [12, 12, 30, 2])
    sizes = torch.stack([torch.ones_like(words), torch.full_like(words, 3), words, torch.ones_like(words)], 1)
    buckets = GraphBuckets(lengths, sizes, 8)
    assert [shape.words for _, shape in buckets.shapes] == [8, 16, 30]
    for batch in buckets.epoch(0):
        most, found = int(words[batch.indices].max()), buckets.shapes[batch.length][1].words
        assert found == (8 if most <= 8 else 16 if most <= 16 else 30)


def test_long_texts_come_in_smaller_batches():
    lengths = torch.tensor([90] * 64 + [150] * 64 + [300] * 64)
    buckets = GraphBuckets(lengths, torch.ones(192, 4, dtype=torch.int64), 32)
    sizes = {int(lengths[batch.indices].max()): len(batch) for batch in buckets.epoch(0)}
    assert sizes == {90: 32, 150: 16, 300: 8}


# training


def test_it_learns(trained):
    losses = [line["nll"] for line in trained.folder.lines() if line["kind"] == "dev"]
    assert len(losses) == 8 and min(losses) < 0.5 and losses[0] > 1.3
    assert trained.folder.result["test"]["bleu"] > 35 and trained.folder.result["test"]["entity coverage"] > 60


def test_what_a_run_leaves(trained):
    result, task = trained.folder.result, trained.task
    assert all("bleu" not in line for line in trained.folder.lines() if line["kind"] == "dev")  # looks do not write
    for part in ("dev", "test"):
        found, items, known = result[part], trained.folder.items(part), task.data.parts[part]
        assert {"BLEU-1", "BLEU-4", "ROUGE-L", "entity coverage", "repeated clauses", "nll", "accuracy"} <= set(found)
        assert float(items["nll"].mean()) == pytest.approx(found["nll"])
        assert float(items["correct"].mean()) == pytest.approx(found["accuracy"])
        assert len(items["nll"]) == len(items["hypotheses"]) == len(known) == 20  # graphs
        texts = task.texts(part, [[x for x in row if x] for row in items["hypotheses"].tolist()])
        assert bleu(texts, known.reference_words)[-1] == pytest.approx(found["bleu"])
        assert float(bleu_of(items["bleu_statistics"].sum(0))) == pytest.approx(found["bleu"])
        assert not any("<" in text for text in texts)  # neither types nor marks


def test_the_likelihood_is_that_of_every_text(trained):
    task, model = trained.task, trained.bare.double().eval()
    part, sums = task.data.parts["test"], torch.zeros(20, dtype=torch.float64)
    for text in range(len(part.targets)):
        given, target, graph = alone(task, part, text)
        with torch.inference_mode():
            sums[graph] -= model(*given)[0, torch.arange(len(target)), target].sum()
    expected = float(sums.sum() / len(part.targets.values))
    with torch.inference_mode():
        again = task.evaluate(model, "test").metrics["nll"]
    assert again == pytest.approx(expected, rel=1e-6)
    assert trained.folder.result["test"]["nll"] == pytest.approx(expected, rel=1e-4)
    trained.bare.float()


def test_runs_are_compared(trained, data, tmp_path):
    other = toy_graphs.train(data, tmp_path / "other", "training.epochs=1", "label=short")
    found = rows([trained.folder.path, other.folder.path])
    assert set(found[1].against) == {"bleu", "accuracy", "nll"} and found[1].against["nll"].difference > 0
    (again,) = score([trained.folder.path], "test", device="cpu")
    assert again.cells["entity coverage"].mean == pytest.approx(trained.folder.result["test"]["entity coverage"])
    (own,) = score([trained.folder.path], "train", device="cpu")
    assert "bleu" not in own.cells and own.cells["nll"].mean > 0


@pytest.mark.parametrize("name", ["cosine", "rma"])
def test_every_method_trains(name, data, tmp_path):
    made = open_recipe(f"webnlg/{name}").method
    kept = {key: getattr(made, key) for key in ("rule", "where", "penalty", "stepsize", "alpha")}
    found = toy_graphs.train(data, tmp_path, "training.epochs=2", *(f"method.{k}={v}" for k, v in kept.items()))
    assert found.folder.result["test"]["nll"] < 2.0  # log 30 and more at the start
    assert (len(found.handle.report()) == 2 * 3) == (name == "rma")  # the encoder's alone


def test_attention_of_another_library_trains_the_same(data, tmp_path):
    pytest.importorskip("torch_geometric")
    rule = ("method.rule=svgd", "method.where=encoder", "training.epochs=1", "training.log_every=1")
    losses = []
    for attention in ("own", "pyg"):
        found = toy_graphs.train(data, tmp_path / attention, *rule, f"model.attention={attention}")
        losses.append([line["loss"] for line in found.folder.lines() if line["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[0][-1] < losses[0][0] - 0.5


def test_the_rule_moves_encoder_heads_apart(data):
    recipe = toy_graphs.recipe(data, "method.rule=svgd", "method.where=encoder", "model.layers=3", "method.layers=last")
    model = make_task(recipe).model()
    handle = methods.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, methods.make_rule(recipe.method, 100, 10)
    )
    assert [(report.where, report.layer) for report in handle.report()] == [("encoder", 2)] * 3


@pytest.mark.gpu
def test_captured_training_is_the_same_training(data, tmp_path):
    from repulsive.lab.engine.loop import Loop
    from repulsive.lab.engine.progress import Watcher
    from repulsive.lab.engine.runs import RunFolder

    losses = []
    for capture in ("true", "false"):
        recipe = toy_graphs.recipe(data, "training.log_every=1", "training.tf32=false", f"training.capture={capture}")
        made = Loop(make_task(recipe), recipe, RunFolder(tmp_path / capture), Watcher(), "cuda")
        made.run()
        made.folder.close()
        losses.append([line["loss"] for line in made.folder.lines() if line["kind"] == "train"])
        assert capture == "false" or len(made._gradients.captured._graphs) >= 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_titles_are_read(tmp_path):
    plan_graphs(write_tsv(tmp_path / "raw"), tmp_path / "prepared", minimum=1).make()
    toy_graphs.toml(tmp_path).write_text(toy_graphs.RECIPE.format(data=tmp_path / "prepared"))
    found = toy_graphs.train(tmp_path, tmp_path / "run", "model.titles=true", "training.epochs=1")
    assert found.bare.title_words is not None and found.folder.result["test"]["nll"] > 0


# mistakes


def test_mistakes(data):
    for change, message in (
        ("model.heads=5", "width=32 does not divide into heads=5"),
        ("model.layers=0", "width, heads and layers must be at least 1"),
        ("model.lstm_layers=0", "lstm_layers=0 must be at least 1"),
        ("model.dropout=1.0", "dropout=1.0 must be at least 0 and below 1"),
        ("search.beam=0", "beam=0 must be at least 1"),
        ("search.lenpen=-1", "lenpen=-1.* must not be negative"),
        ("search.lenpen=inf", "lenpen=inf must not be negative, and a finite number"),
        ("loss.coverage=-1", "coverage=-1.* must not be negative"),
        ("loss.label_smoothing=0.1", "label_smoothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            toy_graphs.recipe(data, change)


def test_titles_that_are_not_there(data):
    with pytest.raises(DataError, match=r"no titles; set model\.titles=false"):
        make_task(toy_graphs.recipe(data, "model.titles=true"))

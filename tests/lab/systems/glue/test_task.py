"""Fine-tuning on GLUE: what the model sees, rates by depth, learning, starting points, answers, the table."""

import json
import signal

import pytest
import torch

from repulsive import find_heads
from repulsive.cli.app import run
from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine import methods
from repulsive.lab.engine.loop import Stopped
from repulsive.lab.engine.tables import rows
from repulsive.lab.runs.load import open_methods
from repulsive.lab.runs.score import score
from repulsive.lab.runs.submission import predict
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.model import FineTuned, fill_encoder, load_encoder, make_encoder
from repulsive.lab.systems.glue.submission import submission
from repulsive.lab.systems.glue.table import as_markdown, system
from repulsive.lab.systems.glue.task import joined
from repulsive.lab.systems.registry import make_task, open_recipe
from tests.lab.engine import tiny
from tests.lab.systems.glue import glue_files, toy_glue
from tests.threads import one_thread  # noqa: F401  an autouse fixture

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
CLS, SEP = glue_files.PIECES.index("[CLS]"), glue_files.PIECES.index("[SEP]")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy_glue.make_data(tmp_path_factory.mktemp("glue"), *TASKS)


@pytest.fixture(scope="module")
def mnli(data, tmp_path_factory):
    return toy_glue.train(data, "mnli", tmp_path_factory.mktemp("mnli") / "seed-0", "training.epochs=1")


def task_and_model(data, task, *more):
    made = make_task(toy_glue.recipe(data, task, *more))
    torch.manual_seed(0)
    return made, made.model().eval()


# what the model sees


def test_rows_are_joined_as_bert_has_them(data):
    task, _ = task_and_model(data, "mrpc")
    part, picked = task.parts["train"], torch.tensor([3, 0, 7])
    turned = torch.tensor([False, True, False])
    ids, segments, real = joined(part, picked, 24, (CLS, SEP), turned)
    for row, (number, turn) in enumerate(zip(picked.tolist(), turned.tolist(), strict=True)):
        a, b = (side[number].tolist() for side in part.sentences)
        a, b = (b, a) if turn else (a, b)
        expected = [CLS, *a, SEP, *b, SEP]
        rest = 24 - len(expected)
        assert ids[row].tolist() == expected + [0] * rest
        assert segments[row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * rest
        assert real[row].tolist() == [True] * len(expected) + [False] * rest


def test_single_texts_have_one_segment(data):
    task, _ = task_and_model(data, "cola")
    ids, segments, real = joined(task.parts["train"], torch.tensor([5]), 16, (CLS, SEP))
    words = task.parts["train"].sentences[0][5].tolist()
    assert ids[0].tolist() == [CLS, *words, SEP] + [0] * (14 - len(words))
    assert int(segments.sum()) == 0 and int(real.sum()) == len(words) + 2


def test_pairs_are_trained_on_both_ways_round(data):
    task, _ = task_and_model(data, "mrpc")
    assert open_recipe("glue/mrpc").data.swapped and open_recipe("glue/sts").data.swapped
    assert task.num_data == 320
    seen = [
        (row, turn)
        for batch in task.order(0)
        for inputs in (task.fetch(batch),)
        for row, turn in zip(inputs["rows"].tolist(), inputs["swapped"].tolist(), strict=True)
    ]
    assert sorted(seen) == [(row, turn) for row in range(160) for turn in (False, True)]
    assert max(batch.length for batch in task.order(0)) <= 128


def test_padding_changes_nothing(data):
    task, model = task_and_model(data, "rte")
    picked = torch.arange(4)
    short, long = (model(*joined(task.parts["train"], picked, length, (CLS, SEP))) for length in (24, 96))
    assert torch.allclose(short, long, atol=1e-5)


def test_a_batch_is_padded_to_no_more_than_the_model_has_places_for(tmp_path):
    folder = toy_glue.make_data(tmp_path, "rte", sizes=(60, 9, 9))
    lines = (folder / "raw" / "RTE" / "train.tsv").read_text().splitlines()
    long = [f"{i}\t{'w1 ' * 140}\tw2\tentailment" for i in range(4)]
    (folder / "raw" / "RTE" / "train.tsv").write_text("\n".join([*lines, *long]) + "\n")
    settings = {"glue_task": "rte", "vocabulary": folder / "vocab.txt", "force": True}
    toy_glue.prepare("glue", folder / "raw", folder / "rte", **settings)
    task, _ = task_and_model(folder, "rte")
    assert max(batch.length for batch in task.order(0)) == 128


@pytest.mark.parametrize(("task", "texts"), [("cola", 1), ("mnli", 2), ("sts", 2)])
def test_the_loss_is_a_mean_over_rows(task, texts, data):
    made, model = task_and_model(data, task)
    batch = made.order(0)[0]
    inputs, part, total = made.fetch(batch), made.parts["train"], 0.0
    for row, turn in zip(inputs["rows"].tolist(), inputs["swapped"].tolist(), strict=True):  # one by one: no padding
        sides = [side[row].tolist() for side in part.sentences]
        sides = sides[::-1] if turn else sides
        ids = torch.tensor([[CLS, *(piece for side in sides for piece in [*side, SEP])]])
        segments = torch.tensor([[0] * (len(sides[0]) + 2) + [1] * (len(sides[-1]) + 1) * (texts - 1)])
        logits = model(ids, segments, torch.ones_like(ids, dtype=torch.bool))[0].double()
        label = part.labels[row]
        total += (logits[0] - label / 5) ** 2 if task == "sts" else -logits.log_softmax(-1)[label]
    found = made.loss(model, inputs, batch.length).item()
    assert found == pytest.approx(total.item() / len(batch), rel=1e-5)


@pytest.mark.parametrize("task", ["sst", "sts", "mnli"])
def test_the_loss_never_waits_for_the_device(task, data):
    """Tensors of the device "meta" have no values: whoever waits for one fails. So no mask is asked what it hides."""
    made = make_task(toy_glue.recipe(data, task))
    model = made.model().to("meta")
    batch = made.order(0)[0]
    made.to(torch.device("meta"))
    inputs = {name: x.to("meta") for name, x in made.fetch(batch).items()}
    made.loss(model, inputs, batch.length).backward()
    assert all(p.grad is not None for p in model.parameters())


# rates by depth


@pytest.mark.parametrize(("counted", "top"), [("paper", 1), ("released", 2)])
def test_learning_rates_fall_with_depth(counted, top, data):
    """0.8 to the number of layers above, counted as the paper or as the code does; 0.64 and 0.044 of recipes' notes."""
    task, model = task_and_model(data, "cola", "rates.layer_decay=0.8", f"rates.counted={counted}", "model.head=dense")
    factors = task.rate_factors(model)
    assert factors.keys() == dict(model.named_parameters()).keys()
    expected = {
        "out.weight": 1.0,
        "dense.bias": 1.0,
        "encoder.encoder.layer.1.attention.self.query.weight": 0.8**top,
        "encoder.encoder.layer.0.output.LayerNorm.bias": 0.8 ** (top + 1),
        "encoder.embeddings.word_embeddings.weight": 0.8 ** (top + 2),
        "encoder.embeddings_project.weight": 0.8 ** (top + 2),
    }
    for name, factor in expected.items():
        assert factors[name] == pytest.approx(factor), name
    assert len(set(factors.values())) == 4
    settings = open_recipe("glue/cola").optimizer
    optimizer = methods.make_optimizer(settings, model, factors)
    methods.set_rate(optimizer, 3e-4)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(factors)
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(3e-4 * factors[name])


def test_twelve_layers_as_published(data):
    """ELECTRA-small by the official code: x0.64 at the top, x0.044 for embeddings."""
    task, _ = task_and_model(data, "cola", "rates.layer_decay=0.8")
    model = FineTuned(make_encoder("small", 40), 2)
    factors = task.rate_factors(model)
    assert factors["encoder.encoder.layer.11.intermediate.dense.weight"] == pytest.approx(0.64)
    assert factors["encoder.embeddings.LayerNorm.weight"] == pytest.approx(0.8**14)
    assert round(0.8**14, 3) == 0.044 and factors["out.bias"] == 1.0


def test_the_recipe_is_electras():
    recipe, optimizer = open_recipe("glue/cola"), open_recipe("glue/cola").optimizer
    assert (optimizer.lr, optimizer.weight_decay, recipe.training.batch, recipe.training.epochs) == (3e-4, 0.0, 32, 3)
    assert [open_recipe(f"glue/{name}").training.epochs for name in ("sts", "rte")] == [10, 10]
    assert optimizer.clip * 32 == 1.0 and optimizer.eps * 32 == pytest.approx(1e-6)  # of a sum over 32 rows
    total = 1000
    rates = [methods.rate_at(step, optimizer, total) / optimizer.lr for step in range(total)]
    assert rates == pytest.approx([min(1, (step + 1) / 100) * (1 - step / total) for step in range(total)])
    assert not optimizer.bias_correction and optimizer.decay == "matrices"
    assert recipe.training.average == 1  # the last weights


# learning


@pytest.mark.parametrize(
    ("task", "metric", "epochs"),
    [
        pytest.param("cola", "matthews", 12, marks=pytest.mark.slow),
        pytest.param("sst", "accuracy", 12, marks=pytest.mark.slow),
        ("mnli", "accuracy", 12),
        ("sts", "spearman", 6),
    ],
)
def test_it_learns(task, metric, epochs, tmp_path):
    data = toy_glue.make_data(tmp_path, task, sizes=(400, 40, 9))
    made = toy_glue.train(data, task, tmp_path / "run", f"training.epochs={epochs}", "model.dropout=0")
    result = made.folder.result
    assert made.task.select_by == metric and result["test"][metric] > 0.8
    assert result["best_step"] == result["steps"] and result["averaged"] == 1  # the last weights, nothing picked
    assert "nothing was selected on it" in result["notes"]["split"]


def test_what_a_run_leaves(mnli):
    result = mnli.folder.result
    assert result["dev"] == result["test"] and result["mismatched"] != result["test"]
    items = mnli.folder.items("mismatched")
    assert {"logits", "labels", "correct", "nll"} <= items.keys() and len(items["nll"]) == 40
    for part in ("test", "mismatched"):
        found = mnli.folder.items(part)
        assert float(found["correct"].double().mean()) == pytest.approx(result[part]["accuracy"])
        assert float(found["nll"].mean()) == pytest.approx(result[part]["nll"])
    assert "f1" not in result["test"] and "matthews" not in result["test"]


def test_metrics_are_the_benchmarks(data, tmp_path):
    for task, also in (("mrpc", "f1"), ("qqp", "f1"), ("sts", "pearson"), ("cola", "matthews")):
        made = toy_glue.train(data, task, tmp_path / task, "training.epochs=1")
        assert also in made.folder.result["test"], task
    points = made.folder.path.parent / "sts"
    (row,) = rows([points])
    assert {"spearman", "pearson", "mse"} <= row.cells.keys() and "nll" not in row.cells
    other = toy_glue.train(data, "sts", tmp_path / "other", "training.epochs=2", "label=longer")
    found = rows([points, other.folder.path])[1]
    assert set(found.against) == {"pearson", "mse"}
    difference = found.cells["pearson"].mean - row.cells["pearson"].mean
    assert found.against["pearson"].difference == pytest.approx(difference, abs=1e-6)
    assert found.against["mse"].difference == pytest.approx(found.cells["mse"].mean - row.cells["mse"].mean)
    other = toy_glue.train(data, "cola", tmp_path / "again", "training.epochs=1", "method.rule=svgd", "label=SVGD")
    assert set(rows([tmp_path / "cola", other.folder.path])[1].against) == {"matthews", "accuracy", "nll"}
    assert rows([points, tmp_path / "cola"])[1].against == {}  # other rows: nothing to pair


def test_picking_by_the_test_set_is_told(data, tmp_path):
    made = toy_glue.train(data, "cola", tmp_path / "run", "training.epochs=2", "training.average=0")
    assert "the best weights were selected on it" in made.folder.result["notes"]["split"]
    held = toy_glue.make_data(tmp_path, "rte", held_out=0.25)
    made = toy_glue.train(held, "rte", tmp_path / "held", "training.epochs=2", "training.average=0")
    assert "selected on 0.25 of the training rows, held out" in made.folder.result["notes"]["split"]
    assert len(made.folder.items("dev")["nll"]) == 40 and len(made.folder.items("test")["nll"]) == 40


def test_stopped_and_resumed_it_is_the_same_run(data, tmp_path):
    """Groups with rates of their own come back from a checkpoint too."""
    more = ("training.epochs=2", "rates.layer_decay=0.8", "training.log_every=1")
    toy_glue.train(data, "rte", tmp_path / "whole", *more)
    stop = tiny.At(7, tiny.signalled(signal.SIGTERM))
    with pytest.raises(Stopped):
        toy_glue.train(data, "rte", tmp_path / "parts", *more, watcher=stop)
    toy_glue.train(data, "rte", tmp_path / "parts", *more)
    tiny.assert_same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(("changes", "groups"), [([], 6), (["method.layers=first"], 3), (["method.parts=q"], 2)])
def test_heads_repel_on_any_layer(changes, groups, data, tmp_path):
    recipe = toy_glue.recipe(data, "cola", "method.rule=svgd", *changes)
    task = make_task(recipe)
    model = task.model()
    assert len(find_heads(model)) == 6
    optimizer = methods.make_optimizer(recipe.optimizer, model, task.rate_factors(model))
    assert len(methods.attach(model, optimizer, recipe, methods.make_rule(recipe.method, 100, 10)).report()) == groups
    if not changes:
        made = toy_glue.train(data, "cola", tmp_path / "run", "method.rule=svgd", "training.epochs=1")
        assert any(line["kind"] == "heads" and line["repulsion"] > 0 for line in made.folder.lines())


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["cola", "sts"])
def test_captured_training_is_the_same_training(task, data, tmp_path):
    """No dropout: the loss of every step, with graphs of several shapes and without any."""
    more = ("model.dropout=0", "training.log_every=1", "training.tf32=false", "training.epochs=6")
    losses = []
    for capture in ("true", "false"):
        made = toy_glue.train(data, task, tmp_path / capture, *more, f"training.capture={capture}", device="cuda")
        losses.append([line["loss"] for line in made.folder.lines() if line["kind"] == "train"])
        assert capture == "false" or len(made._gradients.captured._graphs) >= (2 if task == "cola" else 1)
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


# where it starts


def export(folder, kind="ElectraForPreTraining", vocabulary=True, **sizes):
    """A model as the package transformers writes it, with a head that fine-tuning has no use for."""
    count = len(glue_files.PIECES + glue_files.WORDS)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    family = "Bert" if kind.startswith("Bert") else "Electra"
    more = {} if family == "Bert" else {"embedding_size": 16}
    config = getattr(transformers, f"{family}Config")(**{"vocab_size": count, **small, **more, **sizes})
    torch.manual_seed(5)
    model = getattr(transformers, kind)(config)
    model.save_pretrained(folder)
    if vocabulary:
        glue_files.write_vocabulary(folder)
    return model


@pytest.mark.parametrize("kind", ["ElectraForPreTraining", "ElectraModel", "BertForMaskedLM"])
def test_starting_from_a_folder(kind, data, tmp_path):
    theirs = export(tmp_path / "start", kind)
    made = make_task(toy_glue.recipe(data, "rte", f"model.start={tmp_path / 'start'}", "model.dropout=0.2"))
    model = made.model().eval()
    base = getattr(theirs, theirs.base_model_prefix, theirs).eval()
    ids, segments, real = joined(made.parts["test"], torch.arange(6), 24, (CLS, SEP))
    expected = base(input_ids=ids, token_type_ids=segments, attention_mask=real.long()).last_hidden_state[:, 0]
    assert torch.allclose(model(ids, segments, real), model.out(expected), atol=1e-5)
    assert model.encoder.config.hidden_dropout_prob == model.encoder.config.attention_probs_dropout_prob == 0.2
    assert len(find_heads(model)) == 6
    assert {"start/config.json", "start/model.safetensors"} <= made.checksums.keys()
    assert set(made.rate_factors(model).values()) == {1.0}


def test_starting_from_the_export_of_a_run(data, tmp_path):
    export(tmp_path / "pretrained" / "export")
    vocabulary = tmp_path / "pretrained" / "export" / "vocab.txt"
    vocabulary.write_bytes(vocabulary.read_bytes().replace(b"\n", b"\r\n"))  # the same pieces
    made = make_task(toy_glue.recipe(data, "rte", f"model.start={tmp_path / 'pretrained'}"))
    assert "start/model.safetensors" in made.checksums
    assert torch.equal(
        made.model().encoder.embeddings.word_embeddings.weight,
        load_encoder(tmp_path / "pretrained" / "export").embeddings.word_embeddings.weight,
    )


def test_old_files_are_read(tmp_path):
    """The first BERT files call a norm's weights gamma and beta, and are no safetensors."""
    model = export(tmp_path / "start", "BertModel")
    state = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in model.state_dict().items()
    }
    (tmp_path / "start" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "start" / "pytorch_model.bin")
    found = load_encoder(tmp_path / "start").state_dict()
    assert all(torch.equal(found[name], model.state_dict()[name]) for name in found)


def test_intermediate_training(mnli, data, tmp_path):
    """RTE goes on from MNLI's encoder, with a head of its own; MNLI may have started elsewhere itself."""
    start = mnli.folder.path.parent / "seed-{seed}"
    torch.manual_seed(0)
    task = make_task(toy_glue.recipe(data, "rte", f"model.start={start}"))
    model, weights = task.model(), mnli.folder.best.latest()[1]["model"]
    for name, value in model.state_dict().items():
        if name.startswith("encoder."):
            assert torch.equal(value, weights[name]), name
    assert model.out.weight.shape == (2, 32) and weights["out.weight"].shape == (3, 32)
    second = toy_glue.train(data, "rte", tmp_path / "rte", f"model.start={start}", "training.epochs=1")
    assert any(name.startswith("start/best/") for name in json.loads((tmp_path / "rte/run.json").read_text())["data"])
    third = make_task(toy_glue.recipe(data, "qnli", f"model.start={second.folder.path}")).model()
    known = second.folder.best.latest()[1]["model"]["encoder.encoder.layer.1.output.dense.weight"]
    assert torch.equal(third.encoder.encoder.layer[1].output.dense.weight, known)
    found = system("toy", tmp_path)
    assert set(found.cells) == {"rte+mnli"} and "RTE from MNLI" in as_markdown([found])


def test_models_that_start_from_different_weights_are_in_one_report(data, tmp_path):
    folders = [tmp_path / "rte" / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        start = toy_glue.train(data, "mnli", tmp_path / f"mnli-{seed}", f"seed={seed}", "training.epochs=1")
        toy_glue.train(data, "rte", folder, f"model.start={start.folder.path}", "training.epochs=1")
    assert [method.label for method in open_methods(folders)] == ["RTE (first)", "RTE (second)"]
    toy_glue.train(data, "qnli", tmp_path / "qnli", "training.epochs=1")
    with pytest.raises(RunError, match="was trained on other data"):
        open_methods([folders[0], tmp_path / "qnli"])


def test_starts_that_cannot_be(data, tmp_path):
    def message(*more):
        with pytest.raises(ConfigError) as caught:
            make_task(toy_glue.recipe(data, "rte", *more)).model()
        return str(caught.value)

    assert "holds neither config.json of a model nor recipe.json" in message(f"model.start={tmp_path / 'none'}")
    assert "seed-N" in message(f"model.start={tmp_path / 'none'}")
    near = tmp_path / "mnli+start=x" / "seed-0"
    near.mkdir(parents=True)
    (near / "recipe.json").write_text("{}")
    told = message(f"model.start={tmp_path / 'mnli' / 'seed-0'}")
    assert told.endswith(f"; did you mean {near}?") and "seed-N" not in told
    export(tmp_path / "other")
    (tmp_path / "other" / "vocab.txt").write_text("[PAD]\n")
    assert "has another vocabulary than the data" in message(f"model.start={tmp_path / 'other'}")
    export(tmp_path / "few", vocabulary=False, vocab_size=20)
    assert "has 20 pieces, and the data have 33" in message(f"model.start={tmp_path / 'few'}")
    export(tmp_path / "short", max_position_embeddings=64)
    assert "has 64 positions; prepare with --longest 64" in message(f"model.start={tmp_path / 'short'}")
    transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=40)).save_pretrained(
        tmp_path / "gpt"
    )
    assert "holds a model of type 'gpt2'; known are electra, bert" in message(f"model.start={tmp_path / 'gpt'}")
    (tmp_path / "short" / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in message(f"model.start={tmp_path / 'short'}")
    encoder = make_encoder("tiny", 40)
    weights = dict(encoder.state_dict())
    weights.pop("encoder.layer.1.output.dense.weight")
    with pytest.raises(ConfigError, match=r"here: has no weights for encoder\.layer\.1\.output\.dense\.weight"):
        fill_encoder(encoder, weights, "here")
    with pytest.raises(ConfigError, match=r"embeddings\.word_embeddings\.weight has the shape \[41, 16\], not \[40"):
        fill_encoder(encoder, make_encoder("tiny", 41).state_dict(), "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.task=wnli", "GLUE task 'wnli' is unknown"),
        ("rates.layer_decay=0", "layer_decay=0.0 must be above 0"),
        ("rates.counted=mine", "must be one of paper, released"),
        ("model.size=large", "must be one of tiny, small, base"),
        ("model.dropout=1", "dropout=1.0"),
        ("method.penalty=1.0", "no regularizer"),
        ("training.compile=true", "many shapes"),
        ("optimizer.warmup_share=1.0", "warmup_share=1.0"),
    ],
)
def test_mistakes_in_a_recipe(change, message, data):
    with pytest.raises(ConfigError, match=message):
        toy_glue.recipe(data, "rte", change)


def test_data_of_another_task(data):
    with pytest.raises(ConfigError, match="holds GLUE task 'cola', and the recipe is for GLUE task 'rte'"):
        make_task(toy_glue.recipe(data, "rte", f"data.folder={data / 'cola'}"))
    with pytest.raises(ConfigError, match="single texts, nothing to swap"):
        make_task(toy_glue.recipe(data, "cola", "data.swapped=true"))


# answers to the test sets


def test_a_submission_has_words_and_a_header():
    logits = torch.tensor([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]])
    assert submission(TASKS["mnli"], logits, [0, 1]) == "index\tprediction\n0\tentailment\n1\tcontradiction\n"
    assert submission(TASKS["qnli"], logits[:, :2], [4, 2]) == "index\tprediction\n4\tnot_entailment\n2\tentailment\n"
    points = torch.tensor([-0.3, 2.34567, 7.0])
    assert submission(TASKS["sts"], points, [0, 1, 2]) == "index\tprediction\n0\t0.000\n1\t2.346\n2\t5.000\n"


def test_files_are_called_as_the_benchmark_wants():
    names = {name: list(task.submissions.values()) for name, task in TASKS.items()}
    assert names == {
        "cola": ["CoLA.tsv"],
        "sst": ["SST-2.tsv"],
        "mrpc": ["MRPC.tsv"],
        "sts": ["STS-B.tsv"],
        "qqp": ["QQP.tsv"],
        "mnli": ["MNLI-m.tsv", "MNLI-mm.tsv"],
        "qnli": ["QNLI.tsv"],
        "rte": ["RTE.tsv"],
    }


def test_predictions_of_a_run(mnli, tmp_path, capsys):
    words = ["evaluate", str(mnli.folder.path), "--device", "cpu"]
    assert run([*words, "--predict", str(tmp_path / "answers")]) == 0
    files = [tmp_path / "answers" / name for name in ("MNLI-m.tsv", "MNLI-mm.tsv")]
    assert capsys.readouterr().out.splitlines() == list(map(str, files))
    for part, name in TASKS["mnli"].submissions.items():
        header, *lines = (tmp_path / "answers" / name).read_text().splitlines()
        assert header == "index\tprediction" and len(lines) == 9
        mnli.bare.eval()
        with torch.inference_mode():
            best = mnli.task.answers(mnli.bare, part).argmax(-1).tolist()
        assert lines == [f"{i}\t{TASKS['mnli'].classes[number]}" for i, number in enumerate(best)]
    assert run([*words, "--part", "predict"]) == 2
    assert "its labels are not public" in capsys.readouterr().err
    (again,) = score([mnli.folder.path], "mismatched", device="cpu")
    assert again.cells["accuracy"].mean == mnli.folder.result["mismatched"]["accuracy"]


def test_predictions_that_cannot_be(data, tmp_path, capsys):
    for seed in (0, 1):
        toy_glue.train(data, "rte", tmp_path / "runs" / f"seed-{seed}", "training.epochs=1", f"seed={seed}")
    with pytest.raises(ConfigError, match="holds seeds 0, 1; a submission has the answers of one"):
        predict(tmp_path / "runs", tmp_path / "out", device="cpu")
    bare = toy_glue.make_data(tmp_path / "bare", "rte")
    (bare / "raw" / "RTE" / "test.tsv").unlink()
    settings = {"glue_task": "rte", "vocabulary": bare / "vocab.txt", "force": True}
    toy_glue.prepare("glue", bare / "raw", bare / "rte", **settings)
    with pytest.raises(ConfigError, match=r"was prepared without test\.tsv"):
        predict(tmp_path / "runs" / "seed-0", tmp_path / "out", bare / "rte", "cpu")
    assert run(["evaluate", "a", "b", "--predict", str(tmp_path / "out")]) == 2
    assert "one run at a time" in capsys.readouterr().err and not (tmp_path / "out").exists()


# many tasks and seeds


@pytest.mark.slow
def test_tasks_and_seeds_in_one_command(data, tmp_path, capsys):
    shared = [word for change in (*toy_glue.TINY, "training.epochs=1") for word in ("--set", change)]
    recipes = []
    for task in ("cola", "sts"):
        own = tmp_path / f"{task}.toml"
        own.write_text(f'extends = "glue/{task}"\n[data]\nfolder = "{data / task}"\n')
        recipes.append(str(own))
    words = ["--seeds", "2", "--markdown", "--device", "cpu", "--out", str(tmp_path / "runs")]
    assert run(["train", *recipes, *shared, *words]) == 0
    output = capsys.readouterr().out
    assert "| CoLA | 2 |" in output and "| STS-B | 2 |" in output and "against" not in output
    found = system("toy", tmp_path / "runs")
    assert found.seeds == {"cola": 2, "sts": 2} and found.cells["cola"].deviation >= 0


def test_the_table(tmp_path):
    def made(name, task, seed, value, start=False):
        folder = tmp_path / name / task / f"seed-{seed}{'-mnli' if start else ''}"
        folder.mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps({"task": "glue", "seed": seed, "data": {"task": task}}))
        metrics = {TASKS[task].metric: value, "nll": 9.0}
        (folder / "result.json").write_text(json.dumps({"test": metrics}))
        sums = {"start/best/step-1/tensors.safetensors": "0"} if start else {"start/model.safetensors": "0"}
        (folder / "run.json").write_text(json.dumps({"data": sums}))

    for number, task in enumerate(TASKS):
        for seed in (0, 1):
            made("ma", task, seed, 0.5 + number / 100 + seed / 50)
    made("ma", "rte", 0, 0.9, start=True)
    made("rma", "cola", 0, 0.625)
    first, second = system("MA", tmp_path / "ma"), system("RMA", tmp_path / "rma")
    assert first.cells["cola"].mean == pytest.approx(51.0) and first.cells["cola"].deviation == pytest.approx(2**0.5)
    assert first.average() == pytest.approx(54.5) and first.average(True) == pytest.approx(54.5 + (90 - 58) / 8)
    assert second.average() is None
    lines = as_markdown([first, second]).splitlines()
    assert lines[0] == (
        "| system | CoLA | SST-2 | MRPC | STS-B | QQP | MNLI | QNLI | RTE | RTE from MNLI | mean | "
        "mean, RTE from MNLI | seeds |"
    )
    assert lines[2].startswith("| MA | 51.0 ± 1.4 |") and lines[2].endswith("| 90.0 | 54.5 | 58.5 | 1-2 |")
    assert lines[3] == "| RMA | 62.5 |  |  |  |  |  |  |  |  |  |  | 1 |"
    made("rma/again", "cola", 0, 0.5)
    with pytest.raises(RunError, match="is cola, seed 0, and so is"):
        system("RMA", tmp_path / "rma")
    with pytest.raises(RunError, match="holds no finished run of GLUE"):
        system("none", tmp_path / "nothing")

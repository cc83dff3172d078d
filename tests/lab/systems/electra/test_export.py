"""Export of pre-trained models, training that starts from an export, and mistakes."""

import signal

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import ConfigError, DataError, RunError
from repulsive.lab.engine.loop import Stopped
from repulsive.lab.runs.export import export
from repulsive.lab.runs.score import load_run, score
from repulsive.lab.systems.electra.model import open_electra, open_masked
from repulsive.lab.systems.registry import make_task
from repulsive.lab.text.folders import read_manifest
from tests.lab.engine import tiny
from tests.lab.systems.electra import words
from tests.threads import one_thread  # noqa: F401  an autouse fixture

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


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

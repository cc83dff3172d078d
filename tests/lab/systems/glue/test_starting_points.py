"""Models that fine-tuning on GLUE starts from: exported folders, other runs, and folders that are refused."""

import json

import pytest
import torch

from repulsive import find_heads
from repulsive.errors import ConfigError, RunError
from repulsive.lab.runs.load import open_methods
from repulsive.lab.systems.glue.model import fill_encoder, load_encoder, make_encoder
from repulsive.lab.systems.glue.table import as_markdown, system
from repulsive.lab.systems.glue.task import joined
from repulsive.lab.systems.registry import make_task
from tests.lab.systems.glue import glue_files, toy_glue
from tests.lab.systems.glue.toy_glue import CLS, SEP
from tests.threads import one_thread  # noqa: F401  an autouse fixture

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


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

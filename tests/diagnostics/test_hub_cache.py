"""Models named as on the Hub: found in the local cache, never downloaded."""

import json
import socket

import pytest
import torch

from repulsive.cli.app import run
from repulsive.diagnostics.loading.hub_cache import cache_folder, cached_model, cached_names, is_model_name
from repulsive.diagnostics.loading.import_path import LoadError
from repulsive.diagnostics.loading.model import load_architecture, load_model
from repulsive.heads import find_heads

transformers = pytest.importorskip("transformers")
NAME, COMMIT = "tiny-lab/little_llama.v2", "0123456789abcdef0123456789abcdef01234567"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "slow", "movie", "was", "not", "great"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama with weights and a tokenizer."""
    path = tmp_path_factory.mktemp("saved")
    (path / "vocab.txt").write_text("\n".join(WORDS))
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": len(WORDS)}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(path)
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch, saved):
    """A cache as huggingface_hub writes it: snapshots are links to blobs. Connections raise an error."""
    folder = tmp_path / "home" / "hub" / "models--tiny-lab--little_llama.v2"
    (folder / "refs").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for file in saved.iterdir():
        (folder / "blobs" / f"blob-of-{file.name}").write_bytes(file.read_bytes())
        (folder / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return folder


def test_the_folder_of_the_cache(monkeypatch, tmp_path):
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_folder()) == "/x/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert cache_folder() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/y")
    assert str(cache_folder()) == "/y"


@pytest.mark.parametrize(
    "name", ["..", "a/..", "../a", "a/b/c", "/a", "a/", "", "a b", "a/b\n", "a..b/c", "a--b/c", "~/a", "a\\b"]
)
def test_names_cannot_leave_the_cache(cache, name):
    assert not is_model_name(name) and cached_model(name) is None


@pytest.mark.parametrize("revision", ["..", "../../../elsewhere", "", "x" * 200, "a/b", "\udcff"])
def test_revisions_cannot_leave_the_cache(cache, revision):
    (cache / "refs" / "main").write_bytes(revision.encode(errors="surrogateescape"))
    if revision != "\udcff":  # a file that is not text counts as missing, and there is one snapshot
        assert cached_model(NAME) is None


def test_every_verb_takes_the_name(cache, saved, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("a slow movie\nnot great\nthe movie was slow\n")
    assert run(["heads", NAME]) == 0 and "layers.0.self_attn" in capsys.readouterr().out
    assert run(["inspect", NAME, "--text", "text.txt", "--twins", "0", "--json", "--card", "card.svg"]) == 0
    by_name = json.loads(capsys.readouterr().out)
    assert run(["inspect", str(saved), "--text", "text.txt", "--twins", "0", "--json", "--out", "other"]) == 0
    assert json.loads(capsys.readouterr().out) == by_name
    assert COMMIT[:12] in (tmp_path / "inspect.html").read_text() and NAME in (tmp_path / "card.svg").read_text()
    assert run(["prune", NAME, "--out", "pruned", "--text", "text.txt", "--keep", "50%", "--border", "0"]) == 0
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pruned").config.num_attention_heads == 2
    assert NAME in (tmp_path / "pruned" / "README.md").read_text()


def test_a_folder_of_that_name_comes_first(cache, saved, tmp_path):
    local = tmp_path / NAME
    local.parent.mkdir()
    saved_config = transformers.LlamaConfig.from_pretrained(saved)
    saved_config.num_hidden_layers = 2
    transformers.LlamaForCausalLM(saved_config).save_pretrained(local)
    assert len(load_architecture(NAME).model.layers) == len(load_model(NAME).model.model.layers) == 2
    assert load_model(NAME).revision == ""


def test_missing_models_name_the_command_that_fetches_them(cache, capsys):
    for words in (
        ["heads", "org/other"],
        ["inspect", "org/other"],
        ["prune", "org/other", "--out", "x", "--sentence", "a"],
    ):
        assert run(words) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "fetch it with: hf download org/other;" in line
    with pytest.raises(LoadError, match=r"did you mean 'tiny-lab/little_llama\.v2'\?"):
        load_model("tiny-lab/little-llama.v2")
    with pytest.raises(LoadError, match=r"no folder '\./org/other'; write a folder"):
        load_model("./org/other")


def test_incomplete_snapshots(cache):
    (cache / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=f"no weights; fetch them with: hf download {NAME}; --random"):
        load_model(NAME)
    assert load_model(NAME, random=True).revision == COMMIT
    (cache / "refs" / "main").unlink()
    assert cached_model(NAME) == cache / "snapshots" / COMMIT  # the only snapshot
    (cache / "snapshots" / "other").mkdir()
    (cache / "snapshots" / "other" / "config.json").write_text("{}")
    assert cached_model(NAME) is None and cached_names() == [NAME]
    (cache / "refs" / "main").write_text("missing")
    with pytest.raises(LoadError, match="hf download"):
        load_model(NAME)


def test_code_of_a_snapshot_does_not_run(cache):
    config = cache / "snapshots" / COMMIT / "config.json"
    entries = json.loads(config.read_text()) | {"auto_map": {"AutoConfig": "trap.Trap", "AutoModel": "trap.Trap"}}
    config.unlink()
    config.write_text(json.dumps(entries))
    (config.parent / "trap.py").write_text("raise SystemExit(7)\n")
    assert type(load_model(NAME).model).__name__ == "LlamaForCausalLM"
    assert type(load_architecture(NAME)).__name__ == "LlamaForCausalLM"


def test_heads_have_the_same_names_with_and_without_weights(saved):
    models = load_architecture(str(saved)), load_model(str(saved)).model
    bare, loaded = ([group.name for group in find_heads(model)] for model in models)
    assert bare == loaded and bare[0].startswith("model.layers.0.")

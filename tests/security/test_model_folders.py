"""Untrusted model folders: nothing is downloaded, no code from a folder runs, and sizes are limited."""

import json
import sys

import pytest

from repulsive.cli.app import run
from repulsive.diagnostics.loading.model import _model_class
from repulsive.errors import ConfigError, DataError
from repulsive.lab.systems.electra import model as electra
from repulsive.lab.systems.glue.model import load_encoder, make_encoder
from repulsive.safety.limits import PARAMETERS
from repulsive.safety.model_folders import offline

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path):
    make_encoder("tiny", 20).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def loader(monkeypatch):
    """Record the calls of transformers' loader of kernel repositories."""
    from transformers import modeling_utils

    calls = []

    def record(*given, **named):
        calls.append(given)
        raise RuntimeError("the loader of kernels was reached")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", record)
    return calls


KERNEL = "someone/attention@main:forward"


@pytest.mark.parametrize(
    "entries",
    [
        {"_attn_implementation": KERNEL},
        {"attn_implementation": KERNEL},
        {"_attn_implementation": {"": KERNEL}},
        {"text_config": {"_attn_implementation": KERNEL}},
    ],
)
def test_names_of_kernel_repositories_are_refused(folder, loader, capsys, entries):
    change(folder, **entries)
    for words in (["heads", str(folder)], ["inspect", str(folder), "--twins", "0", "--out", str(folder / "out")]):
        assert run(words) == 2
        message = capsys.readouterr().err.strip()
        assert "code that would be downloaded and run; remove that entry" in message and "\n" not in message
    for read in (load_encoder, electra.open_masked):
        with pytest.raises((ConfigError, DataError), match="downloaded and run"):
            read(folder)
    assert loader == []


@pytest.mark.parametrize("name", ["flash_attention_2", "paged|flash_attention_3", "flex_attention", "nonsense"])
def test_the_attention_implementation_of_a_configuration_is_ignored(folder, loader, capsys, name):
    change(folder, _attn_implementation=name)
    assert run(["heads", str(folder)]) == 0
    assert run(["inspect", str(folder), "--twins", "1", "--out", str(folder / "out")]) == 0
    assert load_encoder(folder).config._attn_implementation == "sdpa"
    assert loader == []
    change(folder, _attn_implementation="eager")
    assert load_encoder(folder).config._attn_implementation == "eager"


def test_offline_blocks_downloads():
    hub = pytest.importorskip("huggingface_hub")
    before = hub.constants.HF_HUB_OFFLINE
    with offline():
        assert hub.constants.is_offline_mode()
    assert before == hub.constants.HF_HUB_OFFLINE


def test_code_of_a_folder_does_not_run(folder, capsys):
    (folder / "trap.py").write_text("import sys\nsys.modules['caught'] = sys\nraise SystemExit(7)\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer")
    change(folder, auto_map=dict.fromkeys(names, "trap.Trap"))
    assert run(["heads", str(folder)]) == 0
    load_encoder(folder)
    assert "caught" not in sys.modules


@pytest.mark.parametrize("names", [[5], ["pipeline"], ["AutoTokenizer"], [None, {}], "x"])
def test_architectures_are_model_classes_or_nothing(folder, names):
    config = transformers.AutoConfig.from_pretrained(folder)
    config.architectures = names
    assert _model_class(transformers, config) is transformers.AutoModel
    config.architectures = ["ElectraModel"]
    assert _model_class(transformers, config) is transformers.ElectraModel


def test_an_architecture_that_is_a_number_gives_no_traceback(folder, capsys):
    change(folder, architectures=[5])
    code = run(["inspect", str(folder), "--twins", "0", "--out", str(folder / "out")])
    message = capsys.readouterr().err.strip()
    assert code == 0 or (code == 2 and "\n" not in message)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": 4_000_000}, "parameters, more than the limit"),
        ({"vocab_size": 10**12}, "parameters, more than the limit"),
        ({"num_hidden_layers": 10**7}, "layers, more than the limit"),
        ({"hidden_size": 4096 * 16, "intermediate_size": 64}, "parameters, more than the limit"),
    ],
)
def test_sizes_beyond_the_limit_are_refused(folder, monkeypatch, capsys, entries, message):
    change(folder, **entries)
    if "intermediate_size" in entries:  # small enough for the estimate, refused by the exact count
        monkeypatch.setenv(PARAMETERS, "1e8")
    with pytest.raises(ConfigError, match=message):
        load_encoder(folder)
    assert run(["inspect", str(folder), "--random", "--twins", "0", "--out", str(folder / "out")]) == 2
    line = capsys.readouterr().err.strip()
    assert PARAMETERS in line and "\n" not in line


def test_the_limit_of_parameters_can_be_set(folder, monkeypatch):
    monkeypatch.setenv(PARAMETERS, "100")
    with pytest.raises(ConfigError, match="more than the limit of 100; if you trust it, set REPULSIVE_MOST_PARAMETERS"):
        load_encoder(folder)
    monkeypatch.setenv(PARAMETERS, "1e6")
    load_encoder(folder)
    monkeypatch.setenv(PARAMETERS, "many")
    with pytest.raises(ConfigError, match="expected a positive number"):
        load_encoder(folder)


def test_a_model_that_does_not_read_text_is_refused(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.WhisperConfig(
        vocab_size=20,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    transformers.WhisperModel(config).save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(tmp_path)
    capsys.readouterr()
    assert run(["inspect", str(tmp_path), "--sentence", "a a", "--twins", "0", "--out", str(tmp_path)]) == 2
    assert "reads input_features, not text; give it inputs with --example" in capsys.readouterr().err

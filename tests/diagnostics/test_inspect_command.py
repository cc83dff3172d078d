"""`repulsive inspect`: tables and pages for model folders and import paths, and one-line error messages."""

import json
import os
import re
import sys

import pytest
import torch

from repulsive.cli import main
from repulsive.diagnostics.loading.inputs import _check_token_ids, read_sentences
from repulsive.diagnostics.loading.model import load_model
from repulsive.diagnostics.prune import prune, save_pruned
from repulsive.errors import DataError
from tests.heads.zoo import build
from tests.terminal.pseudoterminal import run_at_a_terminal

transformers = pytest.importorskip("transformers")

WORDS = ["the", "a", "movie", "was", "great", "bad", "plot", "actor", "music", "slow", "very", "not", "and"]
MODELS = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

def inputs():
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

def narrow():
    return torch.randn(2, 5, 3)

def headless():
    return nn.Linear(4, 4)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with weights and a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": len(vocabulary)}
    torch.manual_seed(7)
    transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, **sizes)).save_pretrained(path)
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    return path


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    (tmp_path / "models_of_test_inspect.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main(["inspect", *map(str, words)])
        sys.modules.pop("models_of_test_inspect", None)
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return run


def one_line(outcome):
    code, out, err = outcome
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("repulsive: ")
    return err


def test_loading_draws_no_progress_bar_into_a_file(folder, capfd):
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    load_model(str(folder))
    assert capfd.readouterr().err == ""
    assert transformers.utils.logging.is_progress_bar_enabled() == was_enabled


def test_a_folder_with_text(inspect, folder, tmp_path):
    (tmp_path / "text.txt").write_text("the movie was great\n\n  \na slow plot and bad music\nnot bad\n")
    code, out, err = inspect(folder, "--text", "text.txt", "--ablate", "--out", "out", "--full")
    assert code == 0 and "ablat" not in err  # the progress bar is for terminals
    for title in (
        "similarity of heads in weights",
        "similarity of heads in attention",
        "similarity of heads in outputs",
        "first-order importance",
        "by ablation: mean KL divergence of the model's own output distribution",
    ):
        assert title in out
    numbers = json.loads((tmp_path / "out" / "inspect.json").read_text())
    assert numbers["items"] == 3 and len(numbers["ablation"]["change"]) == 2
    page = (tmp_path / "out" / "inspect.html").read_text()
    assert "movie" in page and 'id="layers"' in page


def test_cut_sentences_are_counted(inspect, folder, tmp_path):
    words = ["--sentence", "the movie was great and very slow", "--sentence", "not bad", "--twins", "0"]
    code, out, _ = inspect(folder, *words, "--length", "5")
    assert code == 0 and "note: cut 1 of 2 sentences, after 5 tokens (--length)\n" in out
    assert "<dd>1 of 2 sentences, after 5 tokens</dd>" in (tmp_path / "inspect.html").read_text()
    assert "cut" not in inspect(folder, *words)[1]


def test_sentences_without_ablation_and_without_text(inspect, folder, tmp_path):
    code, out, _ = inspect(folder, "--sentence", "the plot", "--sentence", "not great", "--full")
    assert code == 0 and "ablation" not in out and "similarity of heads in outputs" in out
    assert out.endswith("written to inspect.html\n") and (tmp_path / "inspect.json").is_file()
    code, out, _ = inspect(folder, "--full")
    assert code == 0 and "similarity of heads in outputs" not in out
    assert "note: without inputs only weights are measured" in out


def test_a_card_names_the_model_but_not_its_folders(inspect, folder, tmp_path):
    code, out, _ = inspect(folder, "--sentence", "the plot", "--twins", "0", "--card", "card.svg")
    assert code == 0 and out.endswith("written to inspect.html and card.svg\n")
    card = (tmp_path / "card.svg").read_text()
    assert folder.name in card and str(folder.parent) not in card and "2 layers, 8 heads" in card
    assert "ends in .svg or .png" in one_line(inspect(folder, "--card", "card.gif"))


def test_ten_lines_and_the_verdict_by_default(inspect, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = inspect(folder, "--sentence", "the movie was great", "--sentence", "a slow plot", "--ablate")
    sentence, table, written = out.split("\n\n")
    assert code == 0 and sentence.startswith("This model looks untrained: ") and written.startswith("written to")
    lines = table.splitlines()
    assert lines[0].split() == ["measure", "this", "model", "untrained"] and max(map(len, out.splitlines())) <= 80
    assert sum(not line.startswith(" ") for line in lines[1:]) == 10 and len(lines) <= 13
    _, full, _ = inspect(folder, "--sentence", "the movie was great", "--sentence", "a slow plot", "--full")
    assert len(full.splitlines()) > 40


def test_json_alone_is_printed_to_stdout(inspect, folder, tmp_path):
    code, out, err = inspect(folder, "--sentence", "the movie was great", "--twins", "1", "--json")
    assert code == 0 and out.rstrip("\n") == (tmp_path / "inspect.json").read_text() and "written to" in err
    numbers = json.loads(out)
    assert numbers["verdict"].endswith(".") and "separator" in numbers["kinds"]["scores"]
    code, out, err = inspect(folder, "--json")
    assert code == 0 and json.loads(out)["kinds"] is None and "without inputs" in err


def test_the_weights_of_the_folder_are_measured(inspect, folder):
    code, loaded, _ = inspect(folder, "--full")
    again, other, _ = inspect(folder, "--random", "--full")
    assert code == again == 0 and loaded != other
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    query = model.bert.encoder.layer[0].attention.self.query.weight.detach().double().view(4, -1)
    unit = query / query.norm(dim=-1, keepdim=True)
    pairs = (unit @ unit.T)[tuple(torch.triu_indices(4, 4, 1))]
    line = next(row for row in loaded.splitlines() if row.startswith("bert.encoder.layer.0.attention.self.q "))
    assert line.split()[2] == f"{float(pairs.mean()):+.3f}"


def test_a_model_by_import_path(inspect):
    code, out, _ = inspect(
        "models_of_test_inspect:small", "--example", "models_of_test_inspect:inputs", "--ablate", "--full"
    )
    assert code == 0 and "layers.1.self_attn" in out
    assert "relative change of the model's own output states" in out
    assert inspect("models_of_test_inspect:small")[0] == 0


def test_a_byte_order_mark_is_not_part_of_the_first_sentence(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone two\r\nthree\r\n".encode())
    assert read_sentences(path, [], 9) == ["one two", "three"]


def test_errors_are_one_line(inspect, folder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "run" / "seed-0").mkdir(parents=True)
    (tmp_path / "run" / "seed-0" / "recipe.json").write_text("{}")
    bare = tmp_path / "bare"
    transformers.BertConfig.from_pretrained(folder).save_pretrained(bare)
    for words, expected in (
        (["nowhere"], "no folder 'nowhere'"),
        (["empty.txt"], "'empty.txt' is a file; name a folder"),
        ([folder, "--text", "none.txt"], "cannot read 'none.txt' (No such file or directory); give a file with one"),
        ([folder, "--text", "run"], "cannot read 'run' (Is a directory); give a file with one"),
        ([folder, "--text", "latin.txt"], "cannot read 'latin.txt': it is not UTF-8 text; save it as UTF-8"),
        ([folder, "--text", "empty.txt"], "no sentence"),
        ([folder, "--sentence", " "], "--sentence: the text is empty"),
        ([folder, "--ablate"], "needs inputs"),
        ([folder, "--sentence", "not", "--example", "a:b"], "only one of --text"),
        ([bare], "--random"),
        ([bare, "--random", "--sentence", "not"], "tokenizer"),
        (["models_of_test_inspect:headless"], "no attention heads found"),
        (["run"], "repulsive report run"),
        (["run/seed-0"], "repulsive report run/seed-0"),
        ([folder, "--out", "empty.txt/page"], "cannot be written"),
        ([folder, "--out", "empty.txt"], "cannot be written"),
        ([folder, "--card", "empty.txt/card.svg"], "--card 'empty.txt/card.svg': cannot be written"),
        (["models_of_test_inspect:small", "--sentence", "not"], "--example"),
        (["models_of_test_inspect:small", "--example", "models_of_test_inspect:nothing"], "has no 'nothing'"),
        (["models_of_test_inspect:small", "--example", "inputs"], "package.module:name"),
        (
            ["models_of_test_inspect:small", "--example", "models_of_test_inspect:narrow"],
            "does not run on the example inputs",
        ),
    ):
        assert expected in one_line(inspect(*words)), words


def test_incomplete_weights_are_refused(inspect, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    state = load_file(broken / "model.safetensors")
    save_file(
        {key: value for key, value in state.items() if "query" not in key},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    _, out, err = inspect(broken)
    assert out == "" and "lack 4 parameters" in err and "query" in err


def test_the_tokenizer_of_another_model_is_refused(inspect, folder, tmp_path):
    other = tmp_path / "other"
    config = transformers.BertConfig.from_pretrained(folder)
    config.vocab_size = 8
    transformers.BertForMaskedLM(config).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    assert "use the model's own tokenizer" in inspect(other, "--sentence", "the slow music")[2]


def test_a_pruned_model_is_loaded_with_its_number_of_heads(inspect, folder, tmp_path):
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    smaller = save_pruned(prune(model, [(1, 0), (1, 2)]), tmp_path / "smaller")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (smaller / name).write_bytes((folder / name).read_bytes())
    code, out, _ = inspect(smaller, "--sentence", "the slow music", "--full")
    rows = [line.split() for line in out.splitlines() if line.startswith("bert.encoder.layer.1.attention.self.q ")]
    assert code == 0 and rows[0][1] == "2"


def test_the_decoder_reads_the_same_sentences(inspect, folder, tmp_path):
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 18}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "t5" / name).write_bytes((folder / name).read_bytes())
    code, out, _ = inspect(
        tmp_path / "t5", "--sentence", "the slow music", "--sentence", "not bad", "--out", "out", "--full"
    )
    assert code == 0 and "EncDecAttention" in out
    assert "read the same sentences as the encoder" in (tmp_path / "out" / "inspect.html").read_text()


def test_sentences_without_tokens_are_refused():
    model, _ = build("bert, sdpa")
    with pytest.raises(DataError, match="returns no tokens"):
        _check_token_ids(model, torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.slow
def test_a_terminal_shows_the_time_left_of_ablation(folder, tmp_path):
    command = [sys.executable, "-m", "repulsive", "inspect", str(folder), "--sentence", "the plot", "--ablate"]
    command += ["--sentence", "a movie", "--twins", "0", "--json", "--out", str(tmp_path)]
    out, shown = run_at_a_terminal(command, dict(os.environ), columns=80)
    assert len(json.loads(out)["ablation"]["change"]) == 2
    assert re.search(r"ablating heads ━.* \d/8 (\d:\d\d:\d\d|-:--:--)", shown)

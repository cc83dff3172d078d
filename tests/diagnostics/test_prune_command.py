"""`repulsive prune` as a user calls it: a checkpoint that transformers loads, and one line for each mistake."""

import json
from contextlib import contextmanager, nullcontext

import pytest
import torch

from repulsive.cli.app import run
from repulsive.diagnostics import head_ranking
from repulsive.diagnostics.causal_models import perplexity
from repulsive.diagnostics.head_ranking import rank_heads
from repulsive.diagnostics.loading.inputs import tokenize
from repulsive.diagnostics.loading.model import LoadedModel, load_model
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_change import OutputChange
from repulsive.diagnostics.pruned_checkpoint import prune_model
from repulsive.diagnostics.pruning_measurements import RUNS, Measured, with_times
from repulsive.diagnostics.redundancy import head_ablation
from repulsive.errors import DataError, HeadLayoutError

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"w{i}" for i in range(40)]
TEXT = "\n".join(" ".join(WORDS[(i * j) % 40] for j in range(1, 9)) for i in range(1, 13))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with a word tokenizer, trained for a moment, so that heads differ."""
    path = tmp_path_factory.mktemp("models") / "llama"
    vocabulary = {"<pad>": 0, "<unk>": 1} | {word: i for i, word in enumerate(WORDS, 2)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=42,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=32,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = tokenizer(TEXT.split("\n"), return_tensors="pt")["input_ids"]
    for _ in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_checkpoint_is_ordinary_and_says_what_was_done(folder, text, tmp_path, capfd):
    out = tmp_path / "small"
    assert run(["prune", str(folder), "--text", str(text), "--keep", "67%", "--out", str(out), "--recover", "6"]) == 0
    printed = capfd.readouterr().out
    assert "perplexity" in printed
    assert f"written to {out}; load it with LlamaForCausalLM.from_pretrained" in printed  # not AutoModel
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_attention_heads == 4 and model.config.head_dim == 8
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == 42
    facts = json.loads((out / "pruning.json").read_text())
    measured = facts["measured"]
    assert measured["pruned"]["perplexity"] == pytest.approx(measured["ablated"]["perplexity"], rel=1e-3)
    assert measured["pruned"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert measured["pruned"]["cache_bytes"] == 2 * 2 * 8 * 2 * 4 == measured["whole"]["cache_bytes"]
    assert measured["recovered"]["perplexity"] < measured["pruned"]["perplexity"]
    assert measured["whole"]["change"] == pytest.approx(0, abs=1e-6)
    card = (out / "README.md").read_text()
    assert "4 of 6 query heads" in card and all(f"`{name}`" in card for name in facts["removed"])
    assert sum(len(heads) for heads in facts["removed"].values()) == 4
    assert sorted(p.name for p in out.parent.iterdir()) == ["small", "text.txt"]
    assert {p.stat().st_mode for p in out.iterdir()} == {text.stat().st_mode}  # as the umask gives
    on = "the text that heads were scored on and the model was trained on"
    assert on in card and on in printed and facts["measured_on"] == on
    assert all(m["fastest"] <= m["milliseconds"] <= m["slowest"] for m in measured.values())


def test_models_take_turns_while_they_are_timed():
    order = []

    class Timed(torch.nn.Linear):
        def forward(self, x):
            order.append((self.out_features, "ablated" in contexts))
            return super().forward(x)

    @contextmanager
    def ablated():
        contexts.append("ablated")
        yield
        contexts.pop()

    contexts = []
    whole, small = Timed(2, 2), Timed(2, 1)
    measured = dict.fromkeys(("whole", "ablated", "pruned"), Measured(1, 0, None, 0.0))
    models = {"whole": (whole, nullcontext), "ablated": (whole, ablated), "pruned": (small, nullcontext)}
    timed = with_times(measured, models, {"x": torch.ones(3, 2)})
    assert order == [(2, False), (2, True), (1, False)] * (RUNS + 1)
    assert list(timed) == list(measured)
    assert all(0 < each.fastest <= each.milliseconds <= each.slowest for each in timed.values())


def test_quality_is_measured_on_the_held_out_text(folder, text, tmp_path, capfd):
    """The perplexities are those of the written model on --test, not on --text."""
    other = "\n".join(" ".join(WORDS[(i + j * j) % 40] for j in range(8)) for i in range(5))
    test = tmp_path / "test.txt"
    test.write_text(other)
    out = tmp_path / "small"
    words = [
        "prune",
        str(folder),
        "--text",
        str(text),
        "--test",
        str(test),
        "--keep",
        "67%",
        "--out",
        str(out),
        "--json",
    ]
    assert run(words) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["measured_on"] == "held-out text" and "held-out text" in (out / "README.md").read_text()
    loaded = load_model(str(out))
    on_test, on_text = (perplexity(loaded.model, tokenize(loaded, t.split("\n"), 128).batches) for t in (other, TEXT))
    assert facts["measured"]["pruned"]["perplexity"] == pytest.approx(on_test, rel=1e-5)
    assert abs(on_test - on_text) > 0.1 * on_text
    same = json.loads((out / "pruning.json").read_text())
    assert same == facts


def test_cut_sentences_are_counted(folder, tmp_path, capfd):
    test = tmp_path / "test.txt"
    test.write_text("w1 w2 w3 w4 w5\nw1 w2 w3 w4 w5 w6\nw1 w2\n")
    words = ["prune", str(folder), "--sentence", "w1 w2 w3", "--test", str(test), "--border", "0", "--length", "4"]
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == ["note: held-out text: cut 2 of 3 sentences, after 4 tokens (--length)"]


def test_held_out_text_does_not_change_the_choice_or_the_training(folder):
    """Another held-out text changes the measurements alone; the weights after training are the same."""
    results = []
    for held_out in (TEXT.split("\n")[:4], ["w1 w2 w3 w4", "w9 w9 w9"]):
        loaded = load_model(str(folder))
        batches, test = (tokenize(loaded, lines, 128).batches for lines in (TEXT.split("\n")[4:], held_out))
        results.append(prune_model(loaded, batches, 0.5, test=test, recover=2))
    first, second = results
    assert first.selection == second.selection
    assert first.measured["pruned"].perplexity != second.measured["pruned"].perplexity
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_perplexity_agrees_with_a_loop_over_tokens(folder):
    """exp of the mean of -ln p(token | tokens before it) over all real tokens but the first of each sentence."""
    loaded = load_model(str(folder))
    loaded.model.double()
    sentences = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9"]
    losses = []
    with torch.no_grad():
        for sentence in sentences:
            ids = loaded.tokenizer(sentence, return_tensors="pt")["input_ids"]
            for position in range(1, ids.shape[1]):
                logits = loaded.model(input_ids=ids[:, :position]).logits[0, -1]
                losses.append(-logits.log_softmax(-1)[ids[0, position]])
    expected = torch.stack(losses).mean().exp()
    actual = perplexity(loaded.model, tokenize(loaded, sentences, 128).batches)
    assert actual == pytest.approx(float(expected), rel=1e-5)


def test_an_empty_held_out_text_is_refused(folder, text, tmp_path, capfd):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    words = ["prune", str(folder), "--text", str(text), "--test", str(empty), "--out", str(tmp_path / "out")]
    assert run(words) == 2
    assert "no sentence" in capfd.readouterr().err
    loaded = load_model(str(folder))
    with pytest.raises(DataError, match="held-out"):
        prune_model(loaded, tokenize(loaded, ["w1 w2"], 8).batches, 0.5, test=[])


def test_without_a_border_ranks_follow_gradient_scores(folder, monkeypatch):
    loaded = load_model(str(folder))
    batches = tokenize(loaded, TEXT.split("\n"), 128).batches
    heads = Heads(loaded.model)
    monkeypatch.setattr(head_ranking, "ablate_output", None)  # exact ablation would call it
    ranks = rank_heads(heads, batches, 0.5, border=0)
    assert all(sorted(row.tolist()) == [0, 1, 2, 3, 4, 5] for row in ranks)
    assert torch.equal(ranks, rank_heads(heads, batches, 0.9, border=0))


def test_key_value_heads_go_where_that_fits(folder, text, tmp_path, capfd):
    out = tmp_path / "half"
    assert run(["prune", str(folder), "--text", str(text), "--keep", "50%", "--out", str(out), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["heads"] == [6, 3] and facts["kv_heads"] == [2, 1]
    assert facts["measured"]["pruned"]["cache_bytes"] * 2 == facts["measured"]["whole"]["cache_bytes"]


def test_the_command_takes_a_number_of_key_value_heads(folder, text, tmp_path, capfd):
    words = ["prune", str(folder), "--text", str(text), "--keep", "67%", "--kv-heads"]
    assert run([*words, "1", "--border", "0", "--out", str(tmp_path / "one"), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["heads"] == [6, 3] and facts["kv_heads"] == [2, 1]
    assert run([*words, "5", "--out", str(tmp_path / "five")]) == 2
    assert "choose 1 to 2" in capfd.readouterr().err and not (tmp_path / "five").exists()


def test_ranks_follow_exact_ablation_on_the_border(folder):
    loaded = load_model(str(folder))
    ids = loaded.tokenizer(TEXT.split("\n"), return_tensors="pt")["input_ids"]
    heads = Heads(loaded.model)
    batches = [{"input_ids": ids}]
    ranks = rank_heads(heads, batches, 0.5)
    assert all(sorted(row.tolist()) == [0, 1, 2, 3, 4, 5] for row in ranks)
    by_gradient = rank_heads(heads, batches, 0.5, border=0)
    change = head_ablation(loaded.model, OutputChange(loaded.model, batches)).change
    for row in range(2):
        outer = [head for head in range(6) if by_gradient[row, head] in (0, 5)]
        assert torch.equal(ranks[row, outer], by_gradient[row, outer])
        inner = [head for head in range(6) if head not in outer]
        assert sorted(inner, key=lambda h: float(ranks[row, h])) == sorted(inner, key=lambda h: float(change[row, h]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep", "0%"], "between 0% and 100%"),
        (["--keep", "150%"], "between 0% and 100%"),
        (["--keep", "many"], "between 0% and 100%"),
        (["--recover", "-1"], "recover"),
    ],
)
def test_mistakes_end_in_one_line_and_write_nothing(folder, tmp_path, capfd, words, message):
    out = tmp_path / "out"
    assert run(["prune", str(folder), "--out", str(out), "--sentence", "w1 w2 w3", *words]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, tmp_path: (tmp_path / "missing", []), "no folder"),
        (lambda folder, tmp_path: (folder, ["--text", str(tmp_path / "none.txt")]), "none.txt"),
    ],
)
def test_a_missing_model_or_text_is_named(folder, tmp_path, capfd, change, message):
    model, words = change(folder, tmp_path)
    words = words or ["--sentence", "w1"]
    assert run(["prune", str(model), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capfd.readouterr().err


def test_an_empty_text_and_a_full_folder_are_refused(folder, tmp_path, capfd):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    assert run(["prune", str(folder), "--out", str(tmp_path / "out"), "--text", str(empty)]) == 2
    assert "no sentence" in capfd.readouterr().err
    assert run(["prune", str(folder), "--out", str(tmp_path), "--sentence", "w1"]) == 2
    assert "not an empty folder" in capfd.readouterr().err
    assert run(["prune", str(folder), "--out", str(empty / "out"), "--sentence", "w1"]) == 2
    error = capfd.readouterr().err
    assert "cannot be written (Not a directory)" in error and "scoring" not in error
    assert run(["prune", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "--text FILE" in capfd.readouterr().err


def test_a_family_that_cannot_be_portable_writes_nothing(folder, tmp_path, capfd):
    torch.manual_seed(0)
    source = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=42, n_embd=24, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(source)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(source)
    out = tmp_path / "out"
    assert run(["prune", str(source), "--out", str(out), "--sentence", "w1 w2 w3", "--keep", "67%"]) == 2
    error = capfd.readouterr().err
    assert "width / heads" in error and "repulsive.diagnostics.prune" in error
    assert "scoring" not in error  # refused before the work
    assert not out.exists()


def test_a_width_that_heads_do_not_divide_is_not_the_reason_if_no_number_of_heads_would_do():
    config = transformers.BertConfig(
        vocab_size=42, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16
    )
    loaded = LoadedModel(transformers.BertForMaskedLM(config).eval())
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    message = r"cannot be built with fewer heads: this class .* width / heads\. .*repulsive\.diagnostics\.prune"
    with pytest.raises(HeadLayoutError, match=message):
        prune_model(loaded, [batch], keep=0.75)


def test_another_number_of_heads_than_asked_for_is_explained(folder, text, tmp_path, capfd):
    words = ["prune", str(folder), "--text", str(text), "--border", "0", "--out"]
    assert run([*words, str(tmp_path / "a"), "--keep", "90%"]) == 0
    assert "every layer keeps 4 of 6, the possible number nearest to 90%" in capfd.readouterr().err
    assert run([*words, str(tmp_path / "b"), "--keep", "67%"]) == 0
    assert "every layer keeps 4 of 6\n" in capfd.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(folder, text, tmp_path, capfd):
    bare = tmp_path / "bare"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(bare)
    assert run(["prune", str(bare), "--text", str(text), "--out", str(tmp_path / "small")]) != 0
    error = capfd.readouterr().err
    assert "needs a model folder with a tokenizer" in error and "`repulsive inspect` accepts other models" in error

"""Comparison of two versions of a model: matched heads, difference with its interval, verdict, command."""

import itertools
import json
import math
import statistics

import pytest
import torch

from repulsive.cli import main
from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.comparison_summary import comparison_json, comparison_text, comparison_verdict
from repulsive.diagnostics.model_comparison import (
    Difference,
    _best_partners,
    compare_models,
    match_heads,
    split_batches,
)
from repulsive.diagnostics.prune import prune, save_pruned
from repulsive.errors import DataError

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}


def bert(layers=2, seed=0):
    torch.manual_seed(seed)
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **SIZES)).eval()


def batches(items=12, length=9):
    ids = torch.randint(5, 40, (items, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": ids[:8]}, {"input_ids": ids[8:]}] if items > 8 else [{"input_ids": ids}]


def alike(model):
    """A copy whose query and key weights of heads 1 to 3 are those of head 0, with small changes."""
    other = bert()
    other.load_state_dict(model.state_dict())
    for name, parameter in other.named_parameters():
        if "query" in name or "key" in name:
            heads = parameter.data.unflatten(0, (4, -1))
            heads[1:] = heads[:1] + 0.1 * heads[1:]
    return other


def test_partners_are_those_of_the_best_increasing_choice():
    """Oracle: all increasing choices of rows."""
    make = torch.Generator().manual_seed(0)
    for rows, columns in ((5, 3), (6, 1), (4, 3), (7, 5)):
        cosines = 2 * torch.rand(rows, columns, generator=make).double() - 1
        choices = itertools.combinations(range(rows), columns)
        best = max(choices, key=lambda choice: sum(float(cosines[m, n]) for n, m in enumerate(choice)))
        assert _best_partners(cosines) == list(best)


def test_heads_are_matched_by_weights_if_their_numbers_differ():
    weights = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    kept = [0, 3, 4]
    trained = weights[kept] + 0.3 * torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    assert match_heads(weights, trained) == ([(0, 0), (1, None), (2, None), (3, 1), (4, 2), (5, None)], True)
    assert match_heads(trained, weights)[0] == [(0, 0), (None, 1), (None, 2), (1, 3), (2, 4), (None, 5)]
    assert match_heads(weights, weights.flip(0)) == ([(head, head) for head in range(6)], True)
    unrelated = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))
    assert match_heads(weights[:3], unrelated) == ([(0, 0), (1, 1), (2, None)], False)
    assert match_heads(weights[:3], torch.ones(2, 7))[1] is False


def test_batches_are_split_into_groups_of_items():
    text = {"input_ids": torch.arange(10)[:, None], "flag": True, "scale": torch.ones(3)}
    parts = split_batches([text], 4)
    assert [part["input_ids"].flatten().tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert all(part["flag"] is True and len(part["scale"]) == 3 for part in parts)
    assert len(split_batches([torch.zeros(2, 3), (torch.zeros(1), torch.ones(1))], 8)) == 3


def test_the_interval_is_that_of_students_t():
    before, after = (0.1, 0.2, 0.3, 0.25, 0.15), (0.15, 0.22, 0.38, 0.26, 0.25)
    change = [a - b for a, b in zip(after, before, strict=True)]
    half = 2.776445 * statistics.stdev(change) / math.sqrt(5)  # t of 4 degrees of freedom, 95 %
    low, high = Difference(before, after).interval
    assert low == pytest.approx(statistics.fmean(change) - half, abs=1e-6)
    assert high == pytest.approx(statistics.fmean(change) + half, abs=1e-6)
    assert Difference(before[:3], after[:3]).interval is None and math.isnan(Difference().mean)


def test_more_alike_heads_are_reported_with_their_interval():
    model = bert()
    compared = compare_models(model, alike(model), batches(), twins=0)
    difference = compared.difference
    part = split_batches(batches())[0]
    own = statistics.fmean(each.mean for each in circuit_similarity(alike(model), [part]).logits)
    assert len(difference.before) == 6 and difference.after[0] == pytest.approx(own)
    low, high = difference.interval
    assert 0.5 < low < difference.mean < high
    text = comparison_verdict(compared)
    assert text.startswith("Heads attend more alike than before (mean cosine of attention logits")
    assert "95 % CI +" in text and "over 6 groups of inputs" in text
    assert comparison_verdict(compare_models(alike(model), model, batches(), twins=0)).startswith("Heads attend less")


def test_equal_models_and_few_inputs():
    model = bert()
    same = comparison_verdict(compare_models(model, model, batches(), twins=0))
    assert same.startswith("No significant difference in how alike heads attend")
    few = comparison_verdict(compare_models(model, alike(model), batches(3), twins=0))
    assert few == "Cannot say whether heads attend more or less alike: that needs at least 4 inputs, found 3."
    assert comparison_verdict(compare_models(model, model)).startswith("Only weights were compared; add inputs")


def test_removed_heads():
    model = bert()
    smaller = prune(model, [(0, 1), (1, 0), (1, 2)])
    compared = compare_models(model, smaller, batches(), twins=0)
    assert compared.columns == [[(0, 0), (1, None), (2, 1), (3, 2)], [(0, None), (1, 0), (2, None), (3, 1)]]
    assert compared.removed == [(0, 1), (1, 0), (1, 2)] and compared.added == []
    assert comparison_verdict(compared).startswith("3 of 8 heads are removed (layers 0 and 1); ")
    text = comparison_text(compared)
    assert "layer 1  4 → 2 " in text and "effective heads" not in text
    numbers = json.loads(json.dumps(comparison_json(compared), allow_nan=False))
    assert numbers["removed"] == [[0, 1], [1, 0], [1, 2]] and numbers["heads"][0][2] == [2, 1]
    back = compare_models(smaller, model, batches(), twins=0)
    assert back.added == compared.removed and "3 of 8 heads are added" in comparison_verdict(back)


def test_models_with_different_layers_are_refused():
    with pytest.raises(DataError, match="expected two versions of one model, found 2 and 3 attention layers"):
        compare_models(bert(2), bert(3), batches(), twins=0)


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["inspect", *map(str, words)])
        return left.value.code, *capsys.readouterr()

    return run


def test_the_command_compares_a_model_with_its_pruned_version(inspect, tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(35))]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    model = bert()
    model.save_pretrained("model")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained("model")
    save_pruned(prune(model, [(1, 3)]), "smaller")  # without a tokenizer: that of the first model is used
    (tmp_path / "text.txt").write_text("\n".join(f"w{i} w{i + 3} w{2 * i} w7" for i in range(9)))
    words = ("model", "--compare", "smaller", "--text", "text.txt", "--twins", 0)
    code, out, _ = inspect(*words, "--out", "out")
    assert code == 0 and out.startswith("1 of 8 heads is removed (layer 1); ") and "before → after" in out
    page = (tmp_path / "out" / "inspect.html").read_text()
    assert 'id="fade"' in page and "Heads of model and smaller" in page
    code, out, _ = inspect(*words, "--json")
    assert code == 0 and json.loads(out)["removed"] == [[1, 3]]
    bert(3).save_pretrained("deeper")
    code, out, err = inspect("model", "--compare", "deeper", "--text", "text.txt", "--twins", 0)
    assert (code, out) == (2, "") and err.splitlines()[-1].endswith("found 2 and 3 attention layers")
    narrow = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **{**SIZES, "vocab_size": 6}))
    narrow.save_pretrained("narrow")
    assert "does not run on the inputs of the first" in inspect("model", "--compare", "narrow", "--text", "text.txt")[2]
    assert "no folder 'nowhere'" in inspect("model", "--compare", "nowhere", "--text", "text.txt")[2]


def test_heads_are_matched_if_only_one_model_shares_key_value_heads():
    sizes = {**SIZES, "num_hidden_layers": 1, "head_dim": 8}
    whole = transformers.LlamaModel(transformers.LlamaConfig(num_key_value_heads=2, **sizes))
    smaller = transformers.LlamaModel(
        transformers.LlamaConfig(num_key_value_heads=2, **{**sizes, "num_attention_heads": 2})
    )
    rows = torch.cat([torch.arange(8, 16), torch.arange(24, 32)])  # query heads 1 and 3
    smaller.layers[0].self_attn.q_proj.weight.data = whole.layers[0].self_attn.q_proj.weight.data[rows].clone()
    result = compare_models(whole, smaller, twins=0)
    assert result.columns == [[(0, None), (1, 0), (2, None), (3, 1)]]
    assert result.notes == ()

"""The pruning study on a tiny model: its files, its numbers, and the list of families."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from studies.pruning import border  # noqa: E402
from studies.pruning.families import FAMILIES, try_family  # noqa: E402
from studies.pruning.run import main, similarity_scores  # noqa: E402

from repulsive.diagnostics.causal_models import perplexity  # noqa: E402
from repulsive.diagnostics.head_ranking import rank_heads  # noqa: E402
from repulsive.diagnostics.loading.inputs import tokenize  # noqa: E402
from repulsive.diagnostics.loading.model import load_model  # noqa: E402
from repulsive.diagnostics.model_heads import Heads  # noqa: E402
from repulsive.diagnostics.portable_pruning import prune_portably, select_heads  # noqa: E402

WORDS = [f"w{i}" for i in range(40)]
SENTENCES = [" ".join(WORDS[(i * j + i) % 40] for j in range(1, 9)) for i in range(1, 21)]


@pytest.fixture
def folder(tmp_path):
    vocabulary = {"<pad>": 0, "<unk>": 1} | {word: i for i, word in enumerate(WORDS, 2)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    fields = {**FAMILIES["Llama, SmolLM2"][2], "bos_token_id": None, "eos_token_id": None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model.save_pretrained(tmp_path / "tiny")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES))
    return tmp_path / "tiny"


def test_the_study_writes_numbers_table_and_curve(folder, tmp_path):
    out = tmp_path / "out"
    words = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--border", "0"]
    main([*words, "--keep", "70%", "67%", "50%", "--recover", "2", "--score", "8", "--test", "12", "--rounds", "2"])
    result = json.loads((out / "tiny.json").read_text())
    assert (result["scoring_text"]["sentences"], result["held_out_text"]["sentences"]) == (8, 12)
    first, second = result["sizes"]
    assert first["keep"] == ["70%", "67%"] and (first["heads"], second["heads"]) == (4, 3)
    for row in result["sizes"]:
        assert row["pruned"] == pytest.approx(row["ablated"], rel=1e-3) and row["difference from ablated"] < 1e-4
        assert len(row["random"]) == 3 and len(row["milliseconds"]) == 2
        assert row["parameters"] < result["whole"]["parameters"]
    assert second["cache_bytes"] * 2 == result["whole"]["cache_bytes"]
    table = (out / "tiny.md").read_text()
    assert f"| 4 | 70%, 67% | {first['pruned']:.1f} |" in table and "python -m studies.pruning.run" in table
    assert str(tmp_path) not in table + (out / "tiny.json").read_text()
    assert (out / "tiny.svg").read_text().lstrip().startswith("<?xml")


def test_a_short_text_ends_in_one_line(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and "has 20 sentences; 96 are needed" in capsys.readouterr().err


def test_borders_are_compared_on_held_out_text(folder, tmp_path):
    out = tmp_path / "out"
    words = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(out)]
    border.main([*words, "--keep", "67%", "--texts", "2", "--score", "4", "--test", "12"])
    result = json.loads((out / "tiny-border.json").read_text())
    loaded = load_model(str(folder))
    test = tokenize(loaded, SENTENCES[8:20], 40).batches
    assert result["whole"] == pytest.approx(perplexity(loaded.model, test), rel=1e-5)
    for number, text in enumerate(result["texts"]):
        score = tokenize(loaded, SENTENCES[4 * number : 4 * number + 4], 40).batches
        heads = Heads(loaded.model, score[0])
        assert [row["border"] for row in text["rows"]] == ["0", "2", "all"]
        for row, width in zip(text["rows"], (0, 2, 6), strict=True):  # the same as the command's ranks
            selection = select_heads(heads, rank_heads(heads, score, 4 / 6, border=width), 0.67)
            expected = perplexity(prune_portably(heads, selection, score[0]), test)
            assert row["perplexity"] == pytest.approx(expected, rel=1e-4)
    table = (out / "tiny-border.md").read_text()
    assert table == border.markdown(result) and str(tmp_path) not in table + json.dumps(result)


def test_the_interval_of_a_ratio_of_perplexities():
    tokens, base = [4.0] * 50, [8.0] * 50
    assert border.ratio([base], [base], tokens) == [1.0, 1.0, 1.0]
    higher = [[10.0] * 50, [12.0] * 50]  # 0.5 and 1 nat per token more
    assert border.ratio(higher, [base, base], tokens) == pytest.approx([math.exp(0.75)] * 3)
    noisy = [8.0 + (-1) ** i for i in range(50)]  # no difference on average, standard error 1 / (4 sqrt(50))
    value, low, high = border.ratio([noisy], [base], tokens)
    assert value == pytest.approx(1.0) and math.log(high) == pytest.approx(1.96 / 4 / 50**0.5, rel=0.1)
    assert math.log(low) == pytest.approx(-1.96 / 4 / 50**0.5, rel=0.1)


def test_duplicate_heads_have_the_lowest_similarity_scores():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILIES["Llama, SmolLM2"][2])).eval()
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight[8:16] = weight[0:8]  # head 1 becomes head 0; both use key-value head 0
    batch = {"input_ids": torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))}
    scores = similarity_scores(Heads(model), [batch])
    assert scores.shape == (2, 6)
    assert set(scores[0].argsort()[:2].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("family", "is_portable", "detail"),
    [("Qwen 3", True, "4 of 6"), ("StableLM", False, "width / heads"), ("OLMo 2", False, "spans all heads")],
)
def test_families_are_tried(family, is_portable, detail):
    result = try_family(*FAMILIES[family])
    assert result[0] is is_portable and detail in result[1]
    assert torch.get_default_dtype() == torch.float32


def test_the_page_shows_the_stored_results():
    from studies.pruning.tables import markdown

    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/pruning.md").read_text()
    for name, write in (("smollm2-135m", markdown), ("smollm2-135m-border", border.markdown)):
        stored = json.loads((root / f"results/pruning/{name}.json").read_text())
        table = (root / f"results/pruning/{name}.md").read_text()
        assert write(stored) == table
        if write is markdown:  # the page has the table of quality, and sizes in one sentence
            quality = table.partition("Size and speed")[0]
            rows = [line for line in quality.splitlines() if line.startswith("| ")]
            assert len(rows) == 2 + 3 and [row for row in rows if row not in page] == []
            sizes, whole = {size["heads"]: size for size in stored["sizes"]}, stored["whole"]
            less = {heads: f"{1 - size['parameters'] / whole['parameters']:.0%}" for heads, size in sizes.items()}
            words = f"With 6 heads parameters fall by {less[6]}, with 4 heads by {less[4]}".replace("%", " %")
            assert f"{words}, and the KV cache per token by a third" in page
            assert {size["cache_bytes"] / whole["cache_bytes"] for size in sizes.values()} == {2 / 3}
        else:  # the page has the ratios of the border study only
            ratios = re.findall(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", table)
            assert len(ratios) == 4 and [ratio for ratio in ratios if ratio not in page] == []

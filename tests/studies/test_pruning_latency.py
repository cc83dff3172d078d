"""The latency of pruned models: variants, cache sizes, intervals and tables, on a tiny shape."""

import json
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from studies.pruning import latency, latency_tables  # noqa: E402

from repulsive.diagnostics.model_heads import Heads  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "--device",
    "cpu",
    "--shapes",
    "tiny",
    "--batches",
    "1",
    "3",
    "--prompt",
    "8",
    "--tokens",
    "2",
    "--rounds",
    "3",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("latency") / "out.json"
    latency.main([*WORDS, "--out", str(path)])
    return path.read_text()


@pytest.fixture
def result(written):
    """A copy for each test: some change it."""
    return json.loads(written)


def test_variants_have_fewer_heads_and_a_smaller_cache(result):
    shape = result["shapes"][0]
    variants = [(row["keep"], row["heads"], row["kv_heads"]) for row in shape["variants"]]
    assert variants == [(100, 8, 4), (75, 6, 3), (50, 4, 2)]
    for row in shape["variants"]:
        assert row["cache_bytes"] == 2 * row["kv_heads"] * 6 * 2 * 4  # keys and values, head size, layers, bytes
        for times in row["batches"].values():
            assert len(times["prefill_ms"]) == len(times["decode_ms"]) == 3 == shape["rounds"]
            assert min(times["prefill_ms"] + times["decode_ms"]) > 0 and times["decode_kernel_ms"] is None
        assert list(row["batches"]) == ["1", "3"]
    assert result["command"].endswith("--out FILE")


@pytest.mark.parametrize(
    ("name", "keep", "expected"),
    [
        ("smollm2-135m", 0.75, (6, 2)),
        ("smollm2-135m", 0.5, (4, 2)),
        ("llama-1b", 0.75, (18, 6)),
        ("llama-1b", 0.5, (12, 4)),
    ],
)
def test_shapes_allow_the_shares(name, keep, expected):
    shape = latency.SHAPES[name] | {"num_hidden_layers": 1, "vocab_size": 10, "intermediate_size": 8}
    heads = Heads(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)))
    scores = torch.rand(1, shape["num_attention_heads"], generator=torch.Generator().manual_seed(0))
    selection = latency.fewest_kv_heads(heads, scores, keep)
    assert (selection.heads[1], selection.kv_heads[1]) == expected


def test_decoding_with_the_cache_gives_the_logits_of_a_complete_pass():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**latency.SHAPES["tiny"])
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(100, (2, 7))
    calls = []
    model.register_forward_hook(lambda module, args, kwargs, out: calls.append((kwargs, out)), with_kwargs=True)
    latency.decode(model, latency.prefill(model, ids), 2)
    tokens = [kwargs["input_ids"] for kwargs, _ in calls]
    assert [x.shape for x in tokens] == [(2, 7), (2, 1), (2, 1)]
    with torch.no_grad():
        whole = model(input_ids=torch.cat(tokens, 1)).logits[:, -1]
    torch.testing.assert_close(calls[2][1].logits[:, -1], whole)


def test_intervals_of_medians():
    interval = latency_tables.median_interval
    assert interval([3, 1, 2]) == (2, 1, 3)  # fewer than 6 values: the whole range
    assert interval(range(1, 7)) == (3.5, 1, 6)  # covers with 1 - 2 / 64 = 96.9 %
    assert interval(range(1, 9)) == (4.5, 1, 8)  # the next pair would cover with 93.0 % only
    assert interval(range(1, 11)) == (5.5, 2, 9)  # 97.9 %
    assert interval(range(1, 21)) == (10.5, 6, 15)  # 95.9 %


def test_the_tables_are_written(result, tmp_path):
    for batch in ("1", "3"):  # ratios are taken within a round
        whole, _, half = (row["batches"][batch] for row in result["shapes"][0]["variants"])
        whole["prefill_ms"], half["prefill_ms"] = [10.0, 20.0, 40.0], [5.0, 11.0, 16.0]
    stored = tmp_path / "file.json"
    stored.write_text(json.dumps(result))
    latency_tables.main([str(stored), "--out", str(tmp_path)])
    text = (tmp_path / "latency.md").read_text()
    assert "| tiny | 50% | 4 of 8 | 2 of 4 |" in text and "GPU busy" not in text
    assert "| tiny | 1 | 50% | 11.00 ms (5.00 to 16.00) | 0.50 (0.40 to 0.55) |" in text
    assert latency_tables.block(result) in text


def test_time_on_a_gpu_is_shown_if_it_was_measured(result):
    for row in result["shapes"][0]["variants"]:
        for times in row["batches"].values():
            times["prefill_kernel_ms"], times["decode_kernel_ms"] = 1.234, 0.5
    assert "| GPU busy, prefill | GPU busy, token |" in latency_tables.block(result)
    assert "| 1.23 ms | 0.50 ms |" in latency_tables.block(result)


def test_the_docs_state_ratios_of_the_stored_results():
    measured = json.loads((ROOT / "results/pruning/latency.json").read_text())
    table = (ROOT / "results/pruning/latency.md").read_text()
    assert table == latency_tables.page(measured)
    section = (ROOT / "docs/pruning.md").read_text().partition("### Latency")[2].partition("\n## ")[0]
    stated = re.findall(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", section)
    assert len(stated) == 4 and [ratio for ratio in stated if ratio not in table] == []

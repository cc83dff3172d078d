"""`proof` of each group, and the groups that `repel` refuses to train."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import repulsive
from repulsive import HeadGroup, HeadLayoutError, find_heads, heads_by_hand, repel, verify_heads
from repulsive.heads.table.parse_layout import rows_of
from repulsive.heads.table.surveyed_classes import SURVEYED
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from tests.heads.tricky import (
    D,
    E,
    FeatureFirst,
    GemmaStyle,
    H,
    InProjection,
    JointAttention,
    KernelAttention,
    MosaicAttention,
    NanochatAttention,
    UNetAttention,
    WrittenOut,
)
from tests.heads.zoo import CausalSelfAttention, TimmAttention, build

X = torch.randn(2, 5, E, generator=torch.Generator().manual_seed(0))


def _repel(model: nn.Module, **options: Any) -> list[HeadGroup]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return list(repel(model, optimizer, verbose=False, **options).groups)


def _rows(groups: list[HeadGroup]) -> dict[str, list[list[int]]]:
    return {g.part: g.slices[0].rows.tolist() for g in groups}


def test_proof_of_table_guessed_traced_and_given_groups() -> None:
    listed, guessed = nn.MultiheadAttention(8, 2, batch_first=True), TimmAttention()
    assert {g.proof for g in find_heads(listed)} == {"table"}
    assert {g.proof for g in find_heads(guessed)} == {"guess"}
    assert {g.proof for g in find_heads(guessed, torch.randn(2, 5, 24))} == {"proved"}
    assert {g.proof for g in heads_by_hand(guessed, {"qkv": ("qkv head dim", 3)})} == {"given"}
    assert {g.proof for g in find_heads(guessed, layout="strided")} == {"guess"}
    assert {g.proof for g in find_heads(listed, particle="head")} == {"table"}
    assert repulsive.HeadReport is not None and repulsive.HeadSlice is not None


def test_an_unknown_proof_is_refused() -> None:
    group = find_heads(nn.MultiheadAttention(8, 2))[0]
    with pytest.raises(HeadLayoutError, match="proof='sure' is unknown"):
        HeadGroup("a.q", 0, "q", "encoder", "", "by hand", group.slices, proof="sure")


def test_repel_refuses_a_guess_and_says_how_to_prove_it() -> None:
    model = nn.Sequential(TimmAttention(), TimmAttention())
    with pytest.raises(HeadLayoutError) as caught:
        _repel(model)
    message = str(caught.value)
    assert "6 groups of heads are a guess" in message and "0.q (signature qkv)" in message
    assert "example_inputs=" in message and "allow_unproved=True" in message
    assert {g.proof for g in _repel(model, allow_unproved=True)} == {"guess"}
    model = nn.Sequential(TimmAttention(), TimmAttention())
    assert {g.proof for g in _repel(model, example_inputs=torch.randn(2, 5, 24))} == {"proved"}


def test_a_refusal_changes_nothing() -> None:
    model = CausalSelfAttention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(HeadLayoutError):
        repel(model, optimizer, verbose=False)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_listed_class_with_another_forward_is_a_guess() -> None:
    class Overridden(nn.MultiheadAttention):
        """A subclass with its own forward."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Renamed(nn.MultiheadAttention):
        """A subclass that changes nothing."""

    patched = nn.MultiheadAttention(8, 2)
    patched.forward = lambda *args: args[0]  # type: ignore[method-assign]
    assert [{g.proof for g in find_heads(m)} for m in (Renamed(8, 2), Overridden(8, 2), patched)] == [
        {"table"},
        {"guess"},
        {"guess"},
    ]


def test_a_class_with_only_the_name_of_a_listed_one_is_a_guess() -> None:
    class Attention(CausalSelfAttention):
        """transformers has a class of this name, with `c_attn` and `n_head`."""

    assert {(g.family, g.proof) for g in find_heads(Attention())} == {("openai-gpt", "guess")}


def test_classes_that_a_survey_has_proved_are_in_the_table() -> None:
    pytest.importorskip("transformers")
    assert {(g.family, g.proof) for g in find_heads(build("olmo2, sdpa")[0])} == {("q_proj/k_proj/v_proj", "table")}
    own = Transformer(TransformerConfig.small(10))
    assert {g.proof for g in find_heads(own)} == {"table"}


def test_every_class_of_timm_that_the_survey_of_packages_proved_is_in_the_table() -> None:
    kept = Path(__file__).parents[2] / "results" / "survey" / "packages.json"
    models = [each for each in json.loads(kept.read_text(encoding="utf-8")) if each["package"] == "timm"]
    proved = {tuple(line.split(" timm.")) for model in models for line in model.get("classes", [])}
    assert len(proved) > 10
    assert {(family, path) for family, path in proved if path not in SURVEYED.get(("timm", family), ())} == set()


@pytest.mark.parametrize("name", ["Swin", "BigBird", "BigBirdPegasus"])
def test_swin_and_full_attention_of_big_bird_are_in_the_table(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "max_position_embeddings": 16}
    encoder = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    seq2seq = {f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("layers", 1), ("ffn_dim", 8))}
    seq2seq |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 8}
    settings: dict[str, Any] = {
        "Swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4},
        "BigBird": {**sizes, **encoder, "attention_type": "original_full"},
        "BigBirdPegasus": {**sizes, **seq2seq, "attention_type": "original_full"},
    }[name]
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings))
    ids = torch.randint(3, 30, (2, 6))
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "Swin" else {"input_ids": ids}
    inputs |= {"decoder_input_ids": ids} if name == "BigBirdPegasus" else {}
    assert {group.proof for group in find_heads(model)} == {"table"}
    assert {report.status for report in verify_heads(model, inputs)} == {"verified"}


def test_a_custom_processor_makes_a_surveyed_class_a_guess() -> None:
    model = Transformer(TransformerConfig.small(10))
    for module in model.modules():
        module.processor = object()  # type: ignore[assignment]
    assert {g.proof for g in find_heads(model)} == {"guess"}


def test_an_example_that_misses_a_group_does_not_prove_it() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x, x, x)[0]

    x = torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match="did not reach"), pytest.raises(HeadLayoutError, match="proves 3 of 6") as e:
        _repel(Half(), example_inputs=x)
    assert "unused.q (no attention call of the example reached unused.in_proj_weight)" in str(e.value)
    with pytest.warns(UserWarning, match="did not reach"):
        assert len(_repel(Half(), example_inputs=x, match="used*")) == 3
    with pytest.warns(UserWarning, match="did not reach"):
        assert len(_repel(Half(), example_inputs=x, allow_unproved=True)) == 6
    assert len(_repel(Half())) == 6  # torch's own class is in the table


@pytest.mark.parametrize("hide", ["own", "reentrant", "not reentrant"])
def test_attention_behind_a_checkpoint_is_traced(hide: str) -> None:
    model = UNetAttention(hide)
    truth = {part: rows.tolist() for part, rows in rows_of("head qkv dim", 3 * H * D, H).items()}
    assert _rows(find_heads(model)) != truth  # the guess from the name is wrong
    with pytest.raises(HeadLayoutError, match="guess"):
        _repel(model)
    groups = _repel(model, example_inputs=X)
    assert _rows(groups) == truth and {g.proof for g in groups} == {"proved"}
    with pytest.raises(HeadLayoutError, match="misses"):
        verify_heads(model, X, heads_by_hand(model, {"qkv": ("qkv head dim", H)}))


def test_an_autograd_function_that_hides_attention_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(HeadLayoutError, match="cannot look into the autograd function Opaque"):
            _repel(KernelAttention(), example_inputs=X)
    assert torch.autograd.Function.__dict__["apply"].__func__.__module__ == "torch.autograd.function"  # restored


def test_attention_written_out_in_an_autograd_function_is_proved() -> None:
    truth = rows_of("head qkv dim", 3 * H * D, H)
    groups = find_heads(KernelAttention(WrittenOut), X)
    assert _rows(groups) == {part: rows.tolist() for part, rows in truth.items()}
    assert {g.proof for g in groups} == {"proved"}


TRUTH = {
    FeatureFirst: rows_of("qkv dim head", 3 * H * D, H),
    MosaicAttention: rows_of("q head dim | kv head dim", (H + 4) * D, H, 2),
    InProjection: rows_of("qkv head dim", 3 * H * D, H),
    GemmaStyle: rows_of("q head dim | kv head dim", (H + 2) * D, H, 1),
    NanochatAttention: {p: rows_of(f"{p} head dim", n * D, n)[p] for p, n in (("q", H), ("k", 2), ("v", 2))},
}


@pytest.mark.parametrize("kind", TRUTH, ids=lambda kind: kind.__name__)
def test_a_guess_is_proved_or_replaced(kind: type[nn.Module]) -> None:
    model = kind()
    assert {g.proof for g in find_heads(model)} == {"guess"}  # found without an example, but repel would refuse it
    groups = _repel(model, example_inputs=X)
    assert _rows(groups) == {part: rows.tolist() for part, rows in TRUTH[kind].items()}
    assert {g.proof for g in groups} == {"proved"}


def test_heads_of_joint_attention_include_both_streams() -> None:
    for example in (None, (X, X[:, :3])):
        groups = {g.part: g for g in find_heads(JointAttention(), example)}
        for part, group in groups.items():
            assert {s.parameter_name for s in group.slices} == {f"to_{part}.weight", f"add_{part}_proj.weight"}
            assert (group.num_heads, group.dim) == (H, 2 * D * E)
    model = JointAttention()
    half = heads_by_hand(model, {f"to_{p}": (p, H) for p in "qkv"})
    # The rows of one stream alone are not the whole head, but they are not wrong.
    assert {r.status for r in verify_heads(model, (X, X[:, :3]), half)} == {"verified"}


def test_packed_grouped_heads_by_hand() -> None:
    model = GemmaStyle()
    named = heads_by_hand(model, {"qkv_proj": ("q head dim | kv head dim", H, 1)})
    assert {r.status for r in verify_heads(model, X, named)} == {"verified"}
    assert named[0].serves == (0,) * H
    with pytest.raises(HeadLayoutError, match="4 query heads cannot share 3 key-value heads evenly"):
        heads_by_hand(model, {"qkv_proj": ("q head dim | kv head dim", H, 3)})

"""find_heads: wrapped models, tied weights, adapters, unsupported weights and near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from repulsive.errors import HeadLayoutError, NoHeadsFound, SelectionError, UnsupportedWeights
from repulsive.heads import describe, find_heads, group_stacked, heads_by_hand, verify_heads
from tests.heads.zoo import SMALL, TimmAttention, build


class Uncounted(nn.Module):
    """Has q, k and v projections but no attribute with the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))


class StrangeAttention(nn.Module):
    """Is called attention, but has no projection that the table names."""

    def __init__(self) -> None:
        super().__init__()
        self.everything = nn.Linear(8, 24)


def test_near_misses_are_listed_with_reasons() -> None:
    model = nn.ModuleDict({"a": Uncounted(), "b": StrangeAttention()})
    with pytest.raises(NoHeadsFound) as caught:
        find_heads(model)
    message = str(caught.value)
    assert "a: has q_proj/k_proj/v_proj but no attribute for the number of heads" in message
    assert "b: StrangeAttention matches none of the" in message
    assert "heads_by_hand(model" in message
    assert "example_inputs=..." in message


def test_mistakes_in_heads_by_hand_name_the_remedy() -> None:
    model = nn.ModuleDict({"attention": Uncounted()})
    with pytest.raises(HeadLayoutError, match=r"'attention.q_porj' is neither .*; did you mean 'attention.q_proj'\?"):
        heads_by_hand(model, {"attention.q_porj": ("q", 2)})
    for entry in (2, ("q",), (2, "q"), ("q", 1, 2, 3)):
        with pytest.raises(HeadLayoutError, match=r"expected a part and a number of heads, such as \('q', 8\), got "):
            heads_by_hand(model, {"attention.q_proj": entry})  # type: ignore[dict-item]


def test_a_head_count_that_does_not_divide_is_a_near_miss() -> None:
    model = Uncounted()
    model.num_heads = 3  # type: ignore[assignment]
    with pytest.raises(NoHeadsFound, match="8 features do not divide into 3 heads"):
        find_heads(model)


def test_a_declared_width_that_disagrees_is_a_near_miss() -> None:
    model = Uncounted()
    model.num_heads, model.head_dim = 4, 4  # type: ignore[assignment]
    with pytest.raises(NoHeadsFound, match="heads have 2 features by shape but 4 by attribute"):
        find_heads(model)


def test_kv_heads_follow_from_the_shapes() -> None:
    model = Uncounted()
    model.num_heads = 4  # type: ignore[assignment]
    model.k_proj, model.v_proj = nn.Linear(8, 4), nn.Linear(8, 4)
    assert [g.num_heads for g in find_heads(model)] == [4, 2, 2]


def test_by_hand() -> None:
    model = nn.ModuleDict({"attn": Uncounted()})
    groups = heads_by_hand(model, {f"attn.{p}_proj": (p, 2) for p in "qkv"})
    assert [g.name for g in groups] == ["attn.q", "attn.k", "attn.v"]
    assert {g.layer for g in groups} == {0}
    torch.testing.assert_close(groups[1].read(), model["attn"].k_proj.weight.detach().view(2, 32), rtol=0, atol=0)
    with pytest.raises(HeadLayoutError, match=r"'attn\.wq' is neither a projection nor a parameter"):
        heads_by_hand(model, {"attn.wq": ("q", 2)})
    with pytest.raises(HeadLayoutError, match="8 features do not divide into 3 heads"):
        heads_by_hand(model, {"attn.q_proj": ("q", 3)})


def test_group_names_do_not_contain_wrappers() -> None:
    plain = nn.Sequential(TimmAttention())
    names = [g.name for g in find_heads(plain)]
    assert [g.name for g in find_heads(nn.DataParallel(plain))] == names
    compiled = torch.compile(nn.DataParallel(plain))
    groups = find_heads(compiled)  # type: ignore[arg-type]
    assert [g.name for g in groups] == names
    assert groups[0].slices[0].parameter_name == "0.qkv.weight"
    inner = nn.Sequential(torch.compile(TimmAttention()))  # type: ignore[arg-type]
    assert [g.name for g in find_heads(inner)] == names
    assert {r.status for r in verify_heads(inner, torch.randn(2, 5, 24))} == {"verified"}


def test_shared_modules_and_tied_parameters_are_one_group() -> None:
    layer = TimmAttention()
    assert len(find_heads(nn.Sequential(layer, layer))) == 3
    tied = nn.Sequential(TimmAttention(), TimmAttention())
    tied[1].qkv.weight = tied[0].qkv.weight
    assert [g.name for g in find_heads(tied)] == ["0.q", "0.k", "0.v"]
    assert {r.status for r in verify_heads(tied, torch.randn(2, 5, 24))} == {"verified"}


def test_parametrised_weights_are_refused_by_name() -> None:
    model = nn.Sequential(TimmAttention())
    parametrizations.weight_norm(model[0].qkv)
    with pytest.raises(UnsupportedWeights, match=r"0\.qkv\.weight: computed from other parameters"):
        find_heads(model)


def _parametrised(attention: nn.Module) -> None:
    parametrizations.weight_norm(attention, "in_proj_weight")


def _weight_normed(attention: nn.Module) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(attention, "in_proj_weight")


def _pruned(attention: nn.Module) -> None:
    prune.l1_unstructured(attention, "in_proj_weight", 0.5)


@pytest.mark.parametrize("change", [_parametrised, _weight_normed, _pruned])
def test_a_computed_in_proj_weight_is_refused(change: Callable[..., None]) -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2))
    change(model[0])
    with pytest.raises(UnsupportedWeights, match=r"0\.in_proj_weight: computed from other parameters"):
        find_heads(model)


def test_attention_with_a_parametrised_bias_is_found() -> None:
    model = nn.MultiheadAttention(8, 2)
    parametrize.register_parametrization(model, "in_proj_bias", nn.Identity())
    assert len(find_heads(model)) == 3


def test_integer_weights_are_refused_by_name() -> None:
    model = nn.Sequential(TimmAttention())
    packed = torch.zeros(72, 24, dtype=torch.int8)
    model[0].qkv.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(UnsupportedWeights, match=r"qkv\.weight: torch.int8 weights"):
        find_heads(model)


def test_lora_heads_are_rows_of_the_adapter() -> None:
    peft = pytest.importorskip("peft")
    model, example = build("llama, sdpa")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    groups = {g.name: g for g in find_heads(wrapped, example)}
    q = groups["base_model.model.layers.0.self_attn.q"]
    assert q.slices[0].parameter_name.endswith("q_proj.lora_B.default.weight")
    assert (q.num_heads, q.dim) == (4, 8 * 3)
    assert groups["base_model.model.layers.0.self_attn.k"].dim == 8 * 32  # no adapter there
    assert len(groups) == 6
    assert {r.status for r in verify_heads(wrapped, example)} == {"verified"}
    with pytest.raises(HeadLayoutError):
        verify_heads(wrapped, example, find_heads(wrapped, layout="strided", match="*.q"))


@pytest.mark.parametrize("kind", ["ia3", "adalora"])
def test_other_adapters_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model, _ = build("llama, sdpa")
    if kind == "ia3":
        config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    else:
        config = peft.AdaLoraConfig(target_modules=["k_proj"], total_step=10)  # its lora_B holds parameters
    wrapped = peft.get_peft_model(model, config)
    with pytest.raises(UnsupportedWeights, match=rf"k_proj: peft\..*{kind}.* is an adapter without modules lora_B"):
        find_heads(wrapped)


def test_towers_are_separate_stacks() -> None:
    transformers = pytest.importorskip("transformers")
    text = {**SMALL, "projection_dim": 16}
    vision = {
        **{k: SMALL[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 16,
    }
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    stacks = {(g.stack, g.layer) for g in find_heads(model)}
    assert stacks == {(f"{tower}_model.encoder.layers", n) for tower in ("text", "vision") for n in (0, 1)}
    assert len(find_heads(model, layers="first", parts="q")) == 2


def test_layers_are_numbered_through_nested_lists() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 2], num_heads=[2, 4], window_size=2
    )
    model = transformers.SwinModel(config)
    groups = find_heads(model, {"pixel_values": torch.randn(1, 3, 32, 32)}, parts="q")
    assert [(g.layer, g.num_heads) for g in groups] == [(0, 2), (1, 4), (2, 4)]


def test_describe_is_a_table_with_totals() -> None:
    lines = describe(find_heads(build("torch packed")[0])).splitlines()
    assert lines[0].split() == ["layer", "where", "part", "heads", "d_head", "parameter", "family", "proof"]
    assert lines[2].split() == ["0", "encoder", "k", "4", "4", "in_proj_weight", "torch", "table"]
    assert lines[-1] == "3 groups, 12 particles, 768 weights"


def test_a_width_called_h_is_not_the_number_of_heads() -> None:
    class Single(Uncounted):
        """One head; h is the hidden size."""

        def __init__(self) -> None:
            super().__init__()
            self.h = 8

    with pytest.raises(NoHeadsFound, match="h=8 would make heads of one feature each"):
        find_heads(Single())
    several = Single()
    several.h = 4
    assert [group.num_heads for group in find_heads(several)] == [4] * 3


@pytest.mark.parametrize("by", ["compile", "checkpoint"])
@pytest.mark.parametrize("kind", [True, False], ids=["one kv head", "all kv heads"])
def test_attention_in_a_wrapper_is_found_once(by: str, kind: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    config = transformers.GPTBigCodeConfig(vocab_size=50, n_embd=32, n_layer=2, n_head=4, multi_query=kind)
    model = transformers.GPTBigCodeModel(config)
    plain = [(g.name, g.slices[0].rows.tolist()) for g in find_heads(model)]
    for block in model.h:
        wrapped = torch.compile(block.attn, backend="eager") if by == "compile" else checkpoint_wrapper(block.attn)
        block.attn = wrapped
    assert [(g.name, g.slices[0].rows.tolist()) for g in find_heads(model)] == plain


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_is_refused_with_a_remedy(how: str) -> None:
    model, x = Small(), torch.randn(2, 3, 8)
    scripted = torch.jit.script(model) if how == "script" else torch.jit.trace(model, x, check_trace=False)
    finders: list[Callable[[], object]] = [
        lambda: find_heads(scripted),
        lambda: find_heads(scripted, x),
        lambda: verify_heads(scripted, x),
        lambda: heads_by_hand(scripted, {"attention": ("qkv head dim", 2)}),
    ]
    for find in finders:
        with pytest.raises(NoHeadsFound, match=r"Small is a TorchScript model.*pass the Python model"):
            find()
    assert all(a is b for a, b in zip(model.parameters(), scripted.parameters(), strict=True))  # as the message says


def test_exported_programs_are_refused_with_a_remedy() -> None:
    x = torch.randn(2, 3, 8)
    program = torch.export.export(Small(), (x,))
    for exported in (program, program.module(), torch.export.unflatten(program)):
        model: Any = exported
        finders: list[Callable[[], object]] = [
            lambda model=model: find_heads(model),
            lambda model=model: find_heads(model, x),
            lambda model=model: verify_heads(model, x),
        ]
        for find in finders:
            with pytest.raises(NoHeadsFound, match=r"is a result of torch.export.*pass the Python model"):
                find()
    Small().load_state_dict(program.state_dict)  # as the message says


def test_heads_in_a_model_traced_by_fx() -> None:
    traced = torch.fx.symbolic_trace(Small())
    assert [group.part for group in find_heads(traced, torch.randn(2, 3, 8))] == ["q", "k", "v"]


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (None, "expected names of projections"),
        ({3: ("q", 2)}, "expected names of projections"),
        ({"attention.out_proj": ("q", "2")}, "number of heads='2': must be a whole number"),
        ({"attention.out_proj": ("q", 0)}, "number of heads=0: must be a whole number, at least 1"),
    ],
)
def test_heads_by_hand_of_another_form(heads: object, message: str) -> None:
    with pytest.raises(HeadLayoutError, match=message):
        heads_by_hand(Small(), heads)  # type: ignore[arg-type]


def test_what_is_not_a_model_is_refused() -> None:
    finders: list[Callable[[str], object]] = [
        find_heads,  # type: ignore[list-item]
        lambda model: verify_heads(model, None),  # type: ignore[arg-type]
        lambda model: heads_by_hand(model, {}),  # type: ignore[arg-type]
        lambda model: group_stacked(model, "weight"),  # type: ignore[arg-type]
    ]
    for find in finders:
        with pytest.raises(SelectionError, match=r"instance of nn.Module, got an object of type str"):
            find("bert-base-uncased")

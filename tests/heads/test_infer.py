"""The trace infers the rows of heads in classes that the family table does not list."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from repulsive.errors import HeadLayoutError, NoHeadsFound
from repulsive.heads import find_heads, verify_heads
from tests.heads.unknown import UNKNOWN, E, Grouped, HeadFastest, Latent, Packed, PerHead


def _built(kind: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return kind(), torch.randn(2, 6, E)


@pytest.mark.parametrize("kind", UNKNOWN, ids=lambda kind: kind.__name__)
def test_inferred_rows_are_the_true_rows(kind: type[nn.Module]) -> None:
    model, x = _built(kind)
    with pytest.raises(NoHeadsFound):
        find_heads(model)
    groups = find_heads(model, x)
    assert {g.part: g.slices[0].rows.tolist() for g in groups} == kind.truth  # type: ignore[attr-defined]
    assert {g.family for g in groups} == {"inferred"}
    assert {r.status for r in verify_heads(model, x)} == {"verified"}


def test_read_uses_the_inferred_rows() -> None:
    model, x = _built(HeadFastest)
    q = find_heads(model, x, parts="q")[0].read()
    torch.testing.assert_close(q[1], model.mix.weight[torch.tensor([1, 5, 9])].flatten(), rtol=0, atol=0)


def test_the_kv_head_of_each_q_head_is_inferred() -> None:
    model, x = _built(Grouped)
    groups = {g.part: g for g in find_heads(model, x)}
    assert groups["q"].serves == (0, 1, 0, 1, 0, 1)
    joined = find_heads(model, x, particle="head")
    assert [s.rows.shape for s in joined[0].slices] == [(2, 9), (2, 3), (2, 3)]
    assert joined[0].slices[0].rows[1].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]


def test_kv_heads_repeated_by_the_attention_function() -> None:
    class Native(Grouped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.to_query(x).unflatten(-1, (6, 3)).transpose(1, 2)
            k, v = (layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (self.to_key, self.to_value))
            out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.merge(out.transpose(1, 2).flatten(2))

    model, x = _built(Native)
    groups = {g.part: g for g in find_heads(model, x)}
    assert {part: g.slices[0].rows.tolist() for part, g in groups.items()} == Grouped.truth
    assert groups["q"].serves == (0, 0, 0, 1, 1, 1)


def test_features_shared_by_all_heads_are_excluded_and_noted() -> None:
    model, x = _built(Latent)
    notes = {r.part: r.note for r in verify_heads(model, x)}
    assert notes == {"q": "", "k": "2 features shared by all heads excluded", "v": ""}


def test_stacked_layers_are_numbered_and_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Packed() for _ in range(3)))
    groups = find_heads(model, torch.randn(2, 5, E))
    assert [(g.name, g.layer) for g in groups][:4] == [("0.q", 0), ("0.k", 0), ("0.v", 0), ("1.q", 1)]


def test_a_table_that_is_wrong_is_replaced_by_the_trace() -> None:
    class Misnamed(HeadFastest):
        """Looks like packed qkv to the table, but its heads are strided."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.qkv = self.mix

    torch.manual_seed(0)
    model, x = Misnamed(), torch.randn(2, 6, E)
    assert {g.family for g in find_heads(model)} == {"qkv"}
    groups = find_heads(model, x)
    assert {g.part: g.slices[0].rows.tolist() for g in groups} == HeadFastest.truth


def test_softmax_without_heads_is_not_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.out = nn.Linear(E, 4), nn.Linear(E, E)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x) * self.gate(x).softmax(-1).max(-1, keepdim=True).values

    with pytest.raises(NoHeadsFound, match="no attention heads found in Router"):
        find_heads(Router(), torch.randn(2, 6, E))


def test_three_dimensional_weights_are_read_head_by_head() -> None:
    model, x = _built(PerHead)
    groups = {g.part: g for g in find_heads(model, x)}
    torch.testing.assert_close(groups["k"].read()[2], model.to_key.detach()[:, 2].flatten(), rtol=0, atol=0)


def test_products_that_each_use_some_of_the_value_heads() -> None:
    class Halves(nn.Module):
        """Two products with the values: the first uses value heads 0 and 1, the second 2 and 3."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, 12) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (p(x).unflatten(-1, (4, 3)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            weights = (q @ k.mT).softmax(-1)
            first, second = (half.repeat_interleave(2, 1) for half in v.chunk(2, 1))
            return torch.cat([weights @ first, weights @ second], -1)

    torch.manual_seed(0)
    assert {r.status for r in verify_heads(Halves(), torch.randn(2, 5, E))} == {"verified"}


def test_lora_on_an_unlisted_class_gives_slices_of_the_adapter() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(Packed(), Packed())
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["mix"]), model)
    groups = find_heads(model, torch.randn(2, 5, E))
    assert {s.parameter_name for g in groups for s in g.slices} == {f"{i}.mix.lora_B.default.weight" for i in (0, 1)}
    assert {g.part: g.slices[0].rows.tolist() for g in groups} == Packed.truth


def test_a_part_that_mixes_heads_is_refused_and_the_others_still_work() -> None:
    class Mixed(Packed):
        """The values of each head are added to those of the next."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv = 4, self.mix

        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().attend(q, k, v + 0.1 * v.roll(1, dims=1))

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 5, E)
    with pytest.raises(HeadLayoutError, match=r"v: attention head \d uses rows"):
        find_heads(model, x)
    assert [g.part for g in find_heads(model, x, parts="qk")] == ["q", "k"]


def test_calls_that_contradict_each_other_give_no_heads() -> None:
    class Twice(Packed):
        """Values are used as four heads, then as two wide ones."""

        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wide = torch.cat([v[:, ::2], v[:, 1::2]], -1).repeat_interleave(2, 1)
            return super().attend(q, k, v) + super().attend(q, k, wide)[..., :3]

    torch.manual_seed(0)
    groups = find_heads(Twice(), torch.randn(2, 5, E))
    assert [g.part for g in groups] == ["q", "k"]


class TalkingHeads(nn.Module):
    """As in timm's CaiT: a learned H x H matrix mixes the scores of all heads before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(E, 3 * E, bias=False)
        self.mix = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, d]
        scores = self.mix((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # [B, H, T, T]
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_rows_of_a_matrix_that_mixes_heads_are_not_heads() -> None:
    model, x = _built(TalkingHeads)
    (only,) = find_heads(model, x)  # values are still separate heads
    assert only.part == "v" and only.slices[0].parameter_name == "packed.weight"
    assert only.slices[0].rows.tolist() == torch.arange(2 * E, 3 * E).view(2, -1).tolist()


class Routed(nn.Module):
    """A router's softmax scales the inputs of attention, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.router = nn.Linear(E, 3)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, E, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.router(x).softmax(-1).amax(-1, keepdim=True)
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_router_before_attention_does_not_hide_its_heads() -> None:
    model, x = _built(Routed)
    groups = find_heads(model, x)
    assert [(g.part, g.num_heads, g.family) for g in groups] == [(p, 2, "q_proj/k_proj/v_proj") for p in "qkv"]
    assert {r.status for r in verify_heads(model, x)} == {"verified"}

"""verify_heads: wrong slices it rejects, its reports, and that it leaves the model unchanged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from repulsive.errors import HeadLayoutError, NoHeadsFound
from repulsive.heads import HeadReport, find_heads, heads_by_hand, verify_heads
from tests.heads.unknown import E, Eager, Grouped, HeadFastest, PerHead
from tests.heads.zoo import build


def test_wrong_head_count_is_caught() -> None:
    model, example = build("torch packed")  # four heads
    for count, message in ((2, "has 4 heads in the attention call, and the slice has 2"), (8, "misses")):
        groups = heads_by_hand(model, {"in_proj_weight": ("qkv head dim", count)})
        for group in groups:
            with pytest.raises(HeadLayoutError, match=message):
                verify_heads(model, example, [group])


def test_neox_sliced_as_packed_is_caught() -> None:
    pytest.importorskip("transformers")
    model, example = build("gpt-neox, sdpa")
    path = "layers.0.attention.query_key_value"
    assert verify_heads(model, example, heads_by_hand(model, {path: ("head qkv dim", 4)}))
    for group in heads_by_hand(model, {path: ("qkv head dim", 4)}):
        with pytest.raises(HeadLayoutError, match=r"attention head \d uses rows .* of layers.0"):
            verify_heads(model, example, [group])


def test_parts_in_the_wrong_order_are_caught() -> None:
    model, example = build("torch packed")
    for group in heads_by_hand(model, {"in_proj_weight": ("kvq head dim", 4)}):
        with pytest.raises(HeadLayoutError):
            verify_heads(model, example, [group])


def test_heads_in_the_wrong_order_are_caught() -> None:
    model, example = build("torch packed")
    rows = torch.arange(16).view(4, 4).flip(0)
    groups = heads_by_hand(model, {"in_proj_weight": ("q", rows)})
    with pytest.raises(HeadLayoutError, match="orders the heads"):
        verify_heads(model, example, groups)


def test_rows_that_miss_a_part_of_the_head_are_caught() -> None:
    model, example = build("torch packed")
    rows = torch.arange(16).view(4, 4)[:, :3].contiguous()
    with pytest.raises(HeadLayoutError, match="misses"):
        verify_heads(model, example, heads_by_hand(model, {"in_proj_weight": ("q", rows)}))


def test_heads_along_the_wrong_axis_are_caught() -> None:
    torch.manual_seed(0)
    model, x = PerHead(), torch.randn(2, 6, E)
    groups = heads_by_hand(model, {"to_query": ("q", torch.arange(8).view(4, 2))})  # rows of the input axis
    with pytest.raises(HeadLayoutError, match="along another axis than 0"):
        verify_heads(model, x, groups)


def test_a_wrong_pairing_of_kv_heads_is_caught() -> None:
    torch.manual_seed(0)
    model, x = Grouped(), torch.randn(2, 6, E)
    groups = find_heads(model, x)
    object.__setattr__(groups[0], "serves", (0, 0, 0, 1, 1, 1))  # the usual order, not this model's
    with pytest.raises(HeadLayoutError, match="serve the q heads"):
        verify_heads(model, x, groups)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_norms_over_the_full_width_are_noted(kind: str) -> None:
    pytest.importorskip("transformers")
    model, example = build(f"olmo2, {kind}")
    notes = {r.part: r.note for r in verify_heads(model, example)}
    assert notes["k"] == "norm over the full width held constant"
    if kind == "sdpa":  # eager: one trace covers both paths; sdpa: v is traced separately
        assert notes["v"] == ""


def test_norms_return_contiguous_tensors_as_torch_does() -> None:
    """Image patches are transposed, and models call `view` on the result of the norm that follows (SmolVLM)."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.norm, self.attention = nn.Conv2d(3, E, 4, 4), nn.LayerNorm(E), Eager()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.norm(self.patches(x).flatten(2).transpose(1, 2))  # [B, T, E]
            out: torch.Tensor = self.attention(tokens.view(2 * len(x), -1, E))
            return out

    torch.manual_seed(0)
    model, images = Patches(), torch.randn(2, 3, 16, 16)
    assert not model.patches(images).flatten(2).transpose(1, 2).is_contiguous()
    assert {report.status for report in verify_heads(model, images)} == {"verified"}


@pytest.mark.parametrize("name", ["torch transformer", "timm", "bert, eager", "gpt2 with cross-attention, sdpa"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, example = build(name)
    model.train()
    next(model.modules()).register_buffer("marker", torch.zeros(1))
    first = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
    first.eval()  # mixed training flags, as in a partly frozen model
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    grads = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        p.grad = grads[n].clone() if p.requires_grad else None
    flags = {n: m.training for n, m in model.named_modules()}
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    state = torch.random.get_rng_state()
    verify_heads(model, example)
    assert torch.equal(state, torch.random.get_rng_state())
    assert {n: m.training for n, m in model.named_modules()} == flags
    assert {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()} == hooks
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    for n, p in model.named_parameters():
        assert (p.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, grads[n])
    assert not frozen.requires_grad


def test_hooks_and_flags_are_restored_when_the_model_fails() -> None:
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(AssertionError):
        verify_heads(model, (torch.randn(3, 1, 7),) * 3)
    assert model.training
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_results_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    model = Eager()
    for batch in (1, 3):
        assert {r.status for r in verify_heads(model, torch.randn(batch, 5, E))} == {"verified"}


def test_one_token_is_refused() -> None:
    model, _ = build("timm")
    with pytest.raises(HeadLayoutError, match="if the example has one token"):
        verify_heads(model, torch.randn(2, 1, 24))
    with pytest.raises(NoHeadsFound, match="several tokens"):
        verify_heads(Eager(), torch.randn(2, 1, E))


def test_groups_that_the_example_misses_are_untraced() -> None:
    class Half(nn.Module):
        """Two attention modules, of which forward uses one."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x, x, x)[0]

    model, x = Half(), torch.randn(5, 2, 8)
    reports = verify_heads(model, x)
    assert [r.status for r in reports] == ["verified"] * 3 + ["untraced"] * 3
    assert math.isnan(reports[-1].leak)
    assert "no attention call" in reports[-1].note
    with pytest.raises(HeadLayoutError, match="no group could be verified"):
        verify_heads(model, x, find_heads(model, match="unused*"))
    with pytest.warns(UserWarning, match="did not reach them: unused.q"):
        find_heads(model, x)


def test_nothing_to_verify_is_an_error() -> None:
    with pytest.raises(NoHeadsFound, match="no heads to verify in Linear"):
        verify_heads(nn.Linear(3, 3), torch.randn(2, 3))


def test_joined_groups_are_verified_too() -> None:
    pytest.importorskip("transformers")
    for name in ("bert, sdpa", "llama, eager", "gpt-neox, eager"):
        model, example = build(name)
        assert {r.status for r in verify_heads(model, example, find_heads(model, particle="head"))} == {"verified"}
    model, example = build("bert, sdpa")
    with pytest.raises(HeadLayoutError):
        verify_heads(model, example, find_heads(model, particle="head", layout="strided"))


def test_strided_is_right_where_heads_are_the_fastest_axis() -> None:
    torch.manual_seed(0)
    model, x = HeadFastest(), torch.randn(2, 6, E)
    assert verify_heads(model, x, heads_by_hand(model, {"mix": ("qkv dim head", 4)}))
    with pytest.raises(HeadLayoutError):
        verify_heads(model, x, heads_by_hand(model, {"mix": ("qkv head dim", 4)}))


def test_report_as_text() -> None:
    assert str(HeadReport("a.q", "q", 4, 0.0, "verified")) == "a.q: 4 heads verified, leak 0.0e+00"
    assert str(HeadReport("a.q", "q", 4, float("nan"), "untraced", "why")) == "a.q: 4 heads untraced (why)"


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_inside_other_contexts(context: Callable[[], AbstractContextManager[None]]) -> None:
    model, example = build("torch transformer")
    with context():
        assert {r.status for r in verify_heads(model, example)} == {"verified"}


def test_half_precision_and_padding() -> None:
    pytest.importorskip("transformers")
    model, example = build("bert, eager")
    example["attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    assert {r.status for r in verify_heads(model.to(torch.bfloat16), example)} == {"verified"}


class Cached(nn.Module):
    """Attention with a bias that evaluation mode caches and `train()` clears, as in LeViT of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.bias, self.frozen = nn.Parameter(torch.zeros(8)), nn.Dropout(0.5).eval()
        self.cache: torch.Tensor | None = None

    def train(self, mode: bool = True) -> Cached:
        super().train(mode)
        self.frozen.eval()
        self.cache = None if mode else self.cache
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.cache is None:
            self.cache = 2 * self.bias
        x = x + (2 * self.bias if self.cache is None else self.cache)
        return self.frozen(self.attention(x, x, x, need_weights=False)[0])


def test_training_mode_is_restored_by_train_so_that_caches_are_cleared() -> None:
    model = Cached().train()
    model.attention.out_proj.eval()
    flags, x = [module.training for module in model.modules()], torch.randn(2, 4, 8)
    verify_heads(model, x)
    assert model.cache is None
    assert [module.training for module in model.modules()] == flags

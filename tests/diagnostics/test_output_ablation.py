"""Ablation with reused results of earlier modules: equal to complete passes, and fewer modules run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.hooks.calling import evaluating
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.output_change import Output, OutputChange, output_change
from repulsive.diagnostics.redundancy import ablate, head_ablation
from repulsive.errors import SelectionError
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from tests.heads.zoo import SMALL, build

transformers = pytest.importorskip("transformers")

FAMILIES = [
    "torch transformer",
    "timm",
    "nanogpt",
    "additive",
    "bert, sdpa",
    "bert with cross-attention, sdpa",
    "albert, sdpa",
    "gpt2 with cross-attention, sdpa",
    "bart, sdpa",
    "llama, sdpa",
    "qwen2, sdpa",
    "olmo2, sdpa",
    "vit, sdpa",
    "phi3",
    "t5",
]


def as_double(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: as_double(value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(as_double(value) for value in inputs)
    return inputs.double() if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


def complete_passes(model: nn.Module, batches: list[Any]) -> Tensor:
    """Ablate every head the plain way: change of each item [L, M, N]."""
    layers = find_attention_layers(model)
    with evaluating(model):
        change = OutputChange(model, batches)
    items = head_ablation(model, change, layers=layers).items
    assert items is not None
    return items


def causal_model(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": layers, "num_key_value_heads": 2})
    return transformers.LlamaForCausalLM(config).double().eval()


def padded(seed: int = 0, shape: tuple[int, int] = (3, 9)) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", FAMILIES)
def test_reused_results_give_the_changes_of_complete_passes(name: str) -> None:
    model, inputs = build(name)
    model, inputs = model.double().eval(), as_double(inputs)
    result = ablate_output(model, [inputs])
    expected = complete_passes(model, [inputs])
    assert result.is_reused and float(expected.nan_to_num().max()) > 0
    actual = result.as_ablation(find_attention_layers(model)).items
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10, equal_nan=True)


def test_padding_and_several_batches() -> None:
    model, batches = causal_model(), [padded(), padded(1, (2, 6))]
    steps: list[tuple[int, int]] = []
    result = ablate_output(model, batches, progress=lambda done, total: steps.append((done, total)))
    layers = find_attention_layers(model)
    ablation, expected = result.as_ablation(layers), complete_passes(model, batches)
    torch.testing.assert_close(ablation.items, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(ablation.change, expected.mean(-1), atol=1e-10, rtol=1e-10)
    assert ablation.items is not None and ablation.items.shape == (4, 4, 5) and ablation.baseline == 0
    assert steps == sorted(steps) and steps[-1] == (16, 16) and result.metric.startswith("mean KL")
    some = ablate_output(model, batches, [(2, 1), (0, 3)])
    torch.testing.assert_close(some.items, torch.stack([expected[2, 1], expected[0, 3]]), atol=1e-10, rtol=1e-10)


def test_encoder_decoder_of_the_laboratory() -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(vocabulary=50)).double().eval()
    batch = (torch.randint(1, 50, (2, 5)), torch.randint(1, 50, (2, 4)))
    result = ablate_output(model, [batch])
    actual = result.as_ablation(find_attention_layers(model)).items
    assert result.is_reused
    torch.testing.assert_close(actual, complete_passes(model, [batch]), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["llama, sdpa", "t5"])
def test_modules_before_the_ablated_head_do_not_run_again(name: str) -> None:
    model, inputs = build(name)
    layers = find_attention_layers(model.eval())
    calls = dict.fromkeys(range(len(layers)), 0)
    for row, layer in enumerate(layers):
        count = lambda *_, row=row: calls.__setitem__(row, calls[row] + 1)  # noqa: E731
        layer.module.register_forward_pre_hook(count)
    last = len(layers) - 1
    assert ablate_output(model, [inputs], [(last, 0), (last, 1)]).is_reused
    # a recorded pass, a reused and a complete pass to compare, and one pass per head
    assert calls[0] == 2 and calls[last] == 5
    assert all(not module.__dict__.get("forward") for module in model.modules())


class _InPlace(nn.Module):
    """Two blocks that write into their input, so that results of earlier modules cannot be reused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            new, _ = block(x, x, x, need_weights=False)
            x = new.add_(x) if block is not self.blocks[0] else new
            x.mul_(2)
        return x


def test_a_model_that_writes_into_results_is_run_completely() -> None:
    model, x = _InPlace().double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)
    result = ablate_output(model, [x])
    assert not result.is_reused
    actual = result.as_ablation(find_attention_layers(model)).items
    torch.testing.assert_close(actual, complete_passes(model, [x]), atol=1e-10, rtol=1e-10)


def test_hooks_that_change_results_run_once() -> None:
    """A block with a forward hook is not replayed: its recorded result would pass through the hook again."""
    model, batch = causal_model(), padded()
    plain = complete_passes(model, [batch])
    model.model.layers[1].register_forward_hook(lambda _m, _a, out: (out[0] if isinstance(out, tuple) else out) * 1.5)
    expected = complete_passes(model, [batch])
    result = ablate_output(model, [batch])
    assert result.is_reused and not torch.allclose(plain, expected)
    actual = result.as_ablation(find_attention_layers(model)).items
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_other_ablated_heads_stay_ablated() -> None:
    model, batch = causal_model(), padded()
    with ablate(model, [(1, 2)]):
        result = ablate_output(model, [batch], [(3, 0)])
        expected = complete_passes(model, [batch])
    torch.testing.assert_close(result.items[0], expected[3, 0], atol=1e-10, rtol=1e-10)
    assert not torch.allclose(expected[3, 0], complete_passes(model, [batch])[3, 0])


def test_nothing_to_ablate_is_an_error() -> None:
    model = causal_model(1)
    for batches, heads in (([], None), ([padded()], [])):
        with pytest.raises(SelectionError, match="need at least one of each"):
            ablate_output(model, batches, heads)


def test_divergence_in_blocks_agrees_with_brute_force() -> None:
    """Rows are compared in blocks; large divergences, impossible classes and padding have their own branches."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3, 7, 70_000, dtype=torch.float64, generator=generator)
    new = (
        old + torch.randn(3, 7, 70_000, dtype=torch.float64, generator=generator) * torch.logspace(-4, 1.2, 7)[:, None]
    )
    old[..., :5], new[..., :5] = -torch.inf, -torch.inf
    real = torch.ones(3, 7, dtype=torch.bool)
    real[1, 2:], real[2] = False, False
    old[1, 3] = torch.nan  # padding
    p, q = old.log_softmax(-1), new.log_softmax(-1)
    rows = (p.exp() * (p - q)).nan_to_num().sum(-1)
    expected = torch.stack([rows[0].mean(), rows[1, :2].mean(), torch.zeros(())])
    actual = output_change(Output("logits", old), Output("logits", new), real)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-8)
    assert float(rows[0, -1]) > 1 > float(rows[0, 0])


class _PassesOn(nn.Module):
    """Sets attributes of the module inside it, as wrappers of TransformerLens do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __setattr__(self, name: str, value: object) -> None:
        inner = self.__dict__.get("_modules", {}).get("inner")
        if inner is None or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_wrappers_that_pass_attributes_on_stay_as_they_are() -> None:
    model, batch = causal_model(), padded()
    expected = complete_passes(model, [batch])
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = _PassesOn(layer)
    result = ablate_output(model, [batch])
    actual = result.as_ablation(find_attention_layers(model)).items
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(complete_passes(model, [batch]), expected)

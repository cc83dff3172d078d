"""Compiled models: resuming, schedules that start at zero, activation checkpointing, masks of layers, LoRA."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch._inductor.utils import get_first_incompatible_cudagraph_node

from repulsive import SVGD, repel
from tests.repulsion.logits.small_decoder import RULE, Attention, Decoder, batch, loss_of, make, train

EVERY_4 = SVGD(alpha=0.05, space="logits", tokens=64, every=4)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)


def test_a_resumed_and_compiled_run_computes_new_forces():
    expected = train(*make(EVERY_4)[:2], range(9))
    model, optimizer, handle = make(EVERY_4)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    again, optimizer, handle = make(EVERY_4)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    torch.testing.assert_close(train(again, optimizer, range(2, 9), run=compiled(again)), expected)
    assert handle._logits.renewals == 3  # loading, and steps 4 and 8


def test_a_compiled_run_with_a_schedule_that_starts_at_zero_computes_forces():
    def alpha(step: int) -> float:
        return 0.0 if step < 3 else 0.05

    rule = SVGD("heads", alpha, space="logits", tokens=64, every=1)
    expected = train(*make(rule)[:2])
    model, optimizer, handle = make(rule)
    torch.testing.assert_close(train(model, optimizer, run=compiled(model)), expected)
    assert handle._logits.renewals == 3


@pytest.fixture
def default_guards():
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):  # torch's default
        yield


@pytest.mark.parametrize("when", ["before", "after", "in turns"])
def test_a_repelled_model_does_not_run_the_graph_of_its_plain_twin(when, default_guards):
    of_plain, of_repelled = train(*make(None)[:2]), train(*make(EVERY_4)[:2])
    plain, plain_optimizer, _ = make(None)
    twin = compiled(plain)
    done = 3 if when == "before" else 0  # steps of the plain twin
    train(plain, plain_optimizer, range(done), run=twin)
    model, optimizer, handle = make(EVERY_4)
    run = compiled(model)
    for step in range(6):
        if when == "in turns":
            train(plain, plain_optimizer, range(step, step + 1), run=twin)
        train(model, optimizer, range(step, step + 1), run=run)
    torch.testing.assert_close(train(model, optimizer, ()), of_repelled)
    train(plain, plain_optimizer, range(6 if when == "in turns" else done, 6), run=twin)
    torch.testing.assert_close(train(plain, plain_optimizer, ()), of_plain)
    assert handle._logits.renewals == 2


def test_a_model_that_was_compiled_and_trained_before_is_sampled(default_guards):
    model, optimizer, _ = make(None)
    run = compiled(model)
    train(model, optimizer, range(2), run=run)
    handle = repel(model, optimizer, EVERY_4, verbose=False, allow_unproved=True)
    train(model, optimizer, range(2, 4), run=run)
    assert handle._logits.renewals == 1


def test_a_model_that_is_compiled_in_the_middle_of_training_is_sampled():
    expected = train(*make(EVERY_4)[:2])
    model, optimizer, handle = make(EVERY_4)
    train(model, optimizer, range(2))
    torch.testing.assert_close(train(model, optimizer, range(2, 6), run=compiled(model)), expected)
    assert handle._logits.renewals == 2


@pytest.mark.slow
def test_layers_compiled_one_by_one_keep_their_hooks():
    def alpha(step: int) -> float:
        return 0.0 if step < 2 else 0.05

    rule = SVGD("heads", alpha, space="logits", tokens=64, every=1)
    model, optimizer, handle = make(rule)
    for layer in model.layers:
        layer.compile(backend="eager")
    train(model, optimizer, range(4))
    assert handle._logits.renewals == 2


def test_layers_compiled_one_by_one_have_one_graph_each():
    model, optimizer, handle = make(EVERY_4)
    for layer in model.layers:
        layer.compile(backend="eager")
    torch._dynamo.utils.counters.clear()
    train(model, optimizer, range(6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(model.layers) > 1
    assert handle._logits.renewals == 2


def test_hooks_that_the_first_uncompiled_pass_does_not_need_are_removed_after_it():
    model, optimizer, _ = make(SVGD("heads", lambda step: 0.0, space="logits", tokens=64))
    counts = []
    for step in range(2):
        counts.append(sum(len(m._forward_hooks) for m in model.modules()))
        train(model, optimizer, range(step, step + 1))
    assert counts == [4, 0]


def test_activation_checkpointing_compiles_without_breaks():
    expected = train(*make()[:2], range(3))
    model, optimizer, handle = make(checkpointed=True)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(train(model, optimizer, range(3), run=compiled(model)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with and without sampling
    assert handle._logits.renewals == 2


def test_only_passes_that_are_sampled_call_operators():
    model, optimizer, handle = make(EVERY_4)
    compiled_graphs, called = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        operators = sum("repulsive" in str(node.target) for node in graph.graph.nodes)
        compiled_graphs.append(operators)

        def run(*args: Any) -> Any:
            called.append(operators)
            return graph(*args)

        return run

    train(model, optimizer, range(9), run=torch.compile(model, backend=backend, fullgraph=True))
    assert len(compiled_graphs) == 2 and sorted(compiled_graphs)[0] == 0 < max(compiled_graphs)
    assert [step for step, operators in enumerate(called) if operators] == [0, 4, 8]
    assert handle._logits.renewals == 3


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this version of torch does not know the tag")
def test_the_compiler_keeps_sampling_out_of_cuda_graphs():
    """A replay of a CUDA graph calls no operator, so mode="reduce-overhead" must not capture graphs with sampling."""
    unsafe = []

    def compile_forward(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        lowered = copy.deepcopy(graph)
        decompose_auto_functionalized(lowered.graph)
        node = get_first_incompatible_cudagraph_node(lowered)
        unsafe.append(None if node is None else str(node.target).partition(".")[0])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=lambda graph, inputs: make_boxed_func(graph))
    for model, optimizer, _ in (make(EVERY_4), make(None)):
        train(model, optimizer, range(2), run=torch.compile(model, backend=backend, fullgraph=True))
    assert unsafe == ["repulsive", None, None]  # a sampled step, a resting one, and plain training


class Masked(nn.Module):
    """Calls its layer with a mask [B, 1, T, T] that the model itself is not called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(30, 16), MaskedAttention(16, 4), nn.Linear(16, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        visible = (ids < 20)[:, None, None, :] | torch.eye(ids.shape[1], dtype=torch.bool)[:1]
        x = self.embed(ids)
        return self.out(torch.utils.checkpoint.checkpoint(self.layer, x, visible, use_reentrant=False))


class MaskedAttention(Attention):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        projected = [p(x).unflatten(-1, (self.num_heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (t.transpose(1, 2) for t in projected)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def test_compiled_models_leave_out_the_padding_of_a_layers_mask():
    weights = []
    for run in (None, compiled):
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = repel(model, optimizer, RULE, verbose=False, allow_unproved=True)
        loss_of(model if run is None else run(model), batch(0)).backward()
        real = float(handle._logits.sampler.samples[0, "k"].weights.sum())
        assert 30 < real < 60  # of 60 tokens
        weights.append((real, train(model, optimizer, range(3), run=None if run is None else run(model))))
    assert weights[0][0] == weights[1][0]
    torch.testing.assert_close(weights[0][1], weights[1][1])


class WithPositions(Attention):
    """Projects positions with the projections of tokens, and runs twice, as layers that share weights do."""

    share_att_key = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        positions = torch.linspace(-1, 1, 9)[:, None].expand(1, 9, 16)
        return result + self.q_proj(positions).mean() + self.k_proj(positions).mean()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(30, 16), WithPositions(16, 4), nn.Linear(16, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.out(self.layer(x + self.layer(x)))


def test_compiled_models_leave_out_projections_of_positions():
    results = []
    for run in (None, compiled):
        torch.manual_seed(0)
        model = Shared()
        given: list[torch.Tensor] = []
        hook = model.layer.q_proj.register_forward_pre_hook(lambda module, args, given=given: given.append(args[0]))
        loss_of(model, batch(0))
        hook.remove()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        handle = repel(model, optimizer, RULE, verbose=False, allow_unproved=True)
        loss_of(model if run is None else run(model), batch(0)).backward()
        sample = handle._logits.sampler.samples[0, "q"]
        torch.testing.assert_close(sample.inputs[0], given[2].flatten(0, 1))  # tokens of the second run of the layer
        results.append(train(model, optimizer, range(3), run=None if run is None else run(model)))
    torch.testing.assert_close(*results)


def test_compiled_models_record_the_inputs_of_adapters():
    peft = pytest.importorskip("peft")
    rule = SVGD("heads", 0.05, space="logits", tokens=64, every=2)
    results = []
    for run in (None, compiled):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
        model = peft.get_peft_model(Decoder(), config)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        repel(model, optimizer, rule, verbose=False, allow_unproved=True)
        results.append(train(model, optimizer, range(3), run=None if run is None else run(model)))
    torch.testing.assert_close(*results)

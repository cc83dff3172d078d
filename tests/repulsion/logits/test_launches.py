"""Number of operations of a step with repulsion between logits: on a GPU each one is a launch, and costs host time."""

import warnings
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from repulsive import SVGD, repel
from repulsive.repulsion.logits import samples as samples_module
from tests.repulsion.logits.small_decoder import Attention, batch, loss_of, make, train

RULE = SVGD(alpha=0.05, space="logits", tokens=32, every=3)


class Deep(nn.Module):
    """A decoder of any depth; `attention_mask` is not used, but tells which tokens are padding."""

    def __init__(self, layers: int, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, 30)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class Operations(TorchDispatchMode):
    """Count the operations of a block of code that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "_unsafe_view" not in str(function):
            self.count[str(function)] += 1
        return result


def deep(layers: int, rule: SVGD = RULE, device: str = "cpu"):
    torch.manual_seed(0)
    model = Deep(layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, repel(model, optimizer, rule, verbose=False, allow_unproved=True)


def operations_of_step(model, handle, step: int) -> Counter[str]:
    """Operations of the update in one step, with the gradients of a new batch."""
    model.zero_grad()
    loss_of(model, batch(step).to(model.out.weight.device)).backward()
    with Operations() as operations:
        handle.apply()
    return operations.count


def test_an_ordinary_step_is_two_launches():
    model, optimizer, handle = deep(3)
    train(model, optimizer, range(1))
    assert handle.steps == 1 and not handle._logits.is_due(1)
    count = operations_of_step(model, handle, 1)
    assert count == {"aten._foreach_mul_.Scalar": 1, "aten._foreach_add_.List": 1}


@pytest.mark.parametrize("kind", ["separate", "grouped", "packed"])
@pytest.mark.parametrize("layers", [2, 6])
def test_a_measurement_adds_few_launches(kind, layers):
    """Norms of all gradients, joined by layer, and one copy to the host; similarities wait for a report."""
    model, inputs = small_model(kind, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rule = SVGD("heads", alpha=0.05, space="logits", tokens=32, every=50)
    handle = repel(model, optimizer, rule, measure_every=101, verbose=False, allow_unproved=True)
    handle.load_state_dict(handle.state_dict() | {"steps": 100})
    counts = []
    for step in range(100, 103):
        optimizer.zero_grad()
        output = model(inputs)
        (output if isinstance(output, torch.Tensor) else output.last_hidden_state).square().mean().backward()
        assert handle._logits.is_due(step) is (step == 100)
        with Operations() as operations:
            handle.apply()
        optimizer.step()
        counts.append(operations.count)
    _, measuring, ordinary = counts
    assert {group.step for group in handle.report()} == {101}
    assert ordinary == {"aten._foreach_add_.List": 1}
    copied = {"aten.stack.default": 1, "aten.linalg_vector_norm.default": 1, "aten.cat.default": 1}
    expected = ordinary + Counter({"aten._foreach_norm.Scalar": 1, "aten.stack.default": 2})
    expected += Counter({"aten.linalg_vector_norm.default": 1, "aten._to_copy.default": 1})
    assert measuring == expected + (Counter(copied) if kind == "packed" else Counter())


def small_model(kind: str, layers: int):
    """A model with its inputs: each query head has a key head or shares it, or q, k and v are one weight."""
    torch.manual_seed(0)
    ids = batch(0)
    if kind == "separate":
        return Deep(layers), ids
    import transformers

    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 4}
    if kind == "packed":
        return transformers.GPT2Model(transformers.GPT2Config(**sizes)), ids
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=8)
    return transformers.LlamaModel(config), ids


def test_value_circuits_are_measured_together():
    """Their forces are computed layer by layer; their numbers are sent to the host by one copy."""
    counts = []
    for layers in (2, 5):
        rule = SVGD(alpha=0.05, space="logits", tokens=32, every=3, circuits="qk+ov")
        model, optimizer, handle = deep(layers, rule)
        train(model, optimizer, range(1))
        handle.settings, handle.steps = replace(handle.settings, measure_every=100), 100
        assert not handle._logits.is_due(100)
        counts.append(operations_of_step(model, handle, 1))
        assert [group.step for group in handle.report()] == [100] * 4 * layers
    assert counts[0] == counts[1] and counts[0]["aten._to_copy.default"] == 1


def test_norms_of_gradients_are_computed_once_per_step():
    """A step that computes a new force and measures needs them twice with `alpha="auto"`."""
    model, _, handle = deep(2, SVGD(alpha="auto", space="logits", tokens=32))
    assert operations_of_step(model, handle, 0)["aten._foreach_norm.Scalar"] == 1
    assert all(group.ratio == pytest.approx(0.1, rel=1e-4) for group in handle.report())


def test_the_launches_of_a_new_force_do_not_grow_with_depth():
    counts = []
    for layers in (2, 6):
        model, optimizer, handle = deep(layers)
        train(model, optimizer, range(3))
        assert handle._logits.is_due(3)
        counts.append(operations_of_step(model, handle, 3))
    assert counts[0] == counts[1] and counts[0].total() < 150


def test_measuring_does_not_change_the_force():
    """Numbers for reports are computed when they are needed, and agree with those of a step that measures."""
    reports = []
    for measure_every in (1, 5):
        model, optimizer, _ = make(None)
        handle = repel(model, optimizer, RULE, verbose=False, allow_unproved=True, measure_every=measure_every)
        weights = train(model, optimizer, range(6))
        reports.append((weights, [group for group in handle.report() if group.step == 5]))
    assert torch.equal(reports[0][0], reports[1][0]) and reports[0][1] == reports[1][1] != []


@pytest.mark.parametrize("with_mask", [False, True])
def test_layers_share_the_sampled_positions(with_mask, monkeypatch):
    calls = []
    whole = samples_module.choose
    monkeypatch.setattr(samples_module, "choose", lambda *args, **more: calls.append(1) or whole(*args, **more))
    model, _, handle = deep(3)
    mask = torch.ones(6, 10, dtype=torch.long)
    mask[:, 7:] = 0
    model(batch(0), attention_mask=mask if with_mask else None).sum().backward()
    assert len(calls) == 1 and len(handle._logits.sampler.samples) == 6
    weights = [sample.weights for sample in handle._logits.sampler.samples.values()]
    assert all(one is other for one, other in pairwise(weights))
    assert handle._logits.sampler.samples[0, "q"].is_full is not with_mask


def test_a_mask_of_the_next_pass_replaces_the_last():
    """With gradient accumulation, a mask may get the address of the mask of the pass before."""
    model, _, handle = deep(1)
    for length in (4, 7, 5, 8):
        model(batch(0), attention_mask=torch.where(torch.arange(10).expand(6, 10) < length, 1, 0))
        sample = handle._logits.sampler.samples[0, "k"]
        assert sample.weights.sum() == length * sample.count


def test_compiled_models_read_masks():
    results = []
    for is_compiled in (False, True):
        model, optimizer, handle = deep(2)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        for step in range(4):
            ids = batch(step)
            mask = (torch.arange(10) < 6 + step).expand(6, 10).long()
            nn.functional.cross_entropy(run(ids, attention_mask=mask).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        results.append((weights, [group.similarity for group in handle.report()]))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-5)


def test_packed_projections_without_a_force_on_one_side():
    """A layer whose keys lose their force keeps no old force in a weight that holds q, k and v."""
    from repulsive.heads.layout import HeadSlice
    from repulsive.repulsion.logits.writer import Writer

    module = nn.Linear(3, 12, bias=False)
    parts = [HeadSlice(module, "weight", "weight", torch.arange(4).view(2, 2) + first) for first in (0, 4)]
    writer = Writer(parts, 0.5)
    first, second = torch.ones(2, 2, 3), torch.full((2, 2, 3), 2.0)
    for forces, expected in (((first, second), (1.5, 2.5, 1.0)), ((first, None), (1.5, 0.5, 1.0))):
        module.weight.grad = torch.ones(12, 3)
        writer.load(forces)
        writer.write(None)
        rows = module.weight.grad.view(3, 4, 3)
        assert [float(row.unique()) for row in rows] == list(expected)


def torch_encoder(device: str):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(30, 16), encoder, nn.Linear(16, 30)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, repel(model, optimizer, RULE, verbose=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [RULE, SVGD(alpha="auto", space="logits", tokens=32, every=3), "torch"])
def test_no_step_waits_for_the_gpu(kind):
    model, optimizer, _ = torch_encoder("cuda") if kind == "torch" else deep(3, kind, "cuda")
    for step in range(7):  # step 3 renews the force, the first steps fill caches
        ids = batch(step).cuda()
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss_of(model, ids).backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

"""Traces of models under FSDP2 and other wrappers, in a process group of one; `test_sharded` has two processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from repulsive import SVGD, HeadLayoutError, HeadMonitor, Heads, UnsupportedWeights, find_heads, repel, verify_heads
from repulsive.errors import RuleError
from repulsive.heads import heads_by_hand
from repulsive.heads.trace.output_projection import trace_output_projections
from repulsive.repulsion.logits.value_circuits import output_groups
from tests.diagnostics.einsum_models import Stack
from tests.diagnostics.einsum_models import X as einsum_inputs
from tests.heads.unknown import E, Eager, H, Interleaved
from tests.heads.zoo import build

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot run FSDP2 on a CPU"),
]
X = torch.randn(4, 5, E, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def own_model():
    """Two classes that the table does not list, with the layout of `Interleaved`."""
    torch.manual_seed(0)
    return nn.Sequential(Interleaved(), Eager())


def shard(model, mesh, *inner, **options):
    from torch.distributed.fsdp import fully_shard

    for module in (*inner, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def rows(groups):
    return {group.name: group.slices[0].rows.tolist() for group in groups}


TRUTH = {f"{layer}.{part}": table for layer in (0, 1) for part, table in Interleaved.truth.items()}


def test_heads_of_an_unknown_class_are_proved_under_fsdp2(mesh):
    model = own_model()
    shard(model, mesh, model[0], model[1].mix)  # a layer, and a projection alone
    before = dict(model.named_parameters())
    hooks = [list(m._forward_pre_hooks.values()) + list(m._forward_hooks.values()) for m in model.modules()]
    groups = find_heads(model, X)
    assert rows(groups) == TRUTH and {group.proof for group in groups} == {"proved"}
    assert {report.status for report in verify_heads(model, X)} == {"verified"}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert hooks == [list(m._forward_pre_hooks.values()) + list(m._forward_hooks.values()) for m in model.modules()]
    with pytest.raises(HeadLayoutError, match="misses"):
        verify_heads(model, X, heads_by_hand(model, {"0.mix": ("qkv head dim", H)}))


def test_heads_of_a_known_class_are_proved_under_fsdp2(mesh):
    pytest.importorskip("transformers")
    model, example = build("llama, sdpa")
    expected = rows(find_heads(model))
    shard(model, mesh, *model.get_submodule("layers" if hasattr(model, "layers") else "model.layers"))
    groups = find_heads(model, example)
    assert rows(groups) == expected and {group.proof for group in groups} == {"proved"}


@pytest.mark.parametrize("is_sharded_first", [True, False])
def test_training_after_a_trace_equals_training_with_whole_weights(mesh, is_sharded_first):
    """Also with groups found before `fully_shard`, the way for models that do not fit on one device."""
    model, inputs = own_model().double().eval(), X.double()  # without dropout
    twin = copy.deepcopy(model)
    for one in (model, twin):
        groups = find_heads(one, inputs)
        if one is model:
            shard(model, mesh, *model)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        heads = {"example_inputs": inputs} if is_sharded_first else {"groups": groups}
        handle = repel(one, optimizer, SVGD(alpha=0.5), **heads, verbose=False)
        for _ in range(3):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()
        assert handle.steps == 3
    for sharded, whole in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(sharded.full_tensor(), whole, rtol=1e-10)


def test_mixed_precision_casts_inputs_and_outputs(mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    class Checked(Interleaved):
        def forward(self, x):
            assert x.dtype == torch.bfloat16
            return super().forward(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Checked(), nn.Linear(E, 2)

        def forward(self, x):
            return self.head(self.inner(x))  # float32 weights

    model = Outer()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    shard(model.inner, mesh, mp_policy=policy)
    shard(model, mesh)
    assert rows(find_heads(model, X)) == {f"inner.{part}": table for part, table in Interleaved.truth.items()}
    assert model(X).dtype == torch.float32


def test_a_failing_forward_pass_leaves_the_model_sharded(mesh):
    model = shard(own_model(), mesh)
    with pytest.raises(RuntimeError, match="shape"):
        find_heads(model, torch.randn(2, 5, E + 1))
    assert all(hasattr(parameter, "placements") for parameter in model.parameters())
    model(X).sum().backward()


def test_a_trace_between_forward_and_backward(mesh):
    """After a forward pass, FSDP2 keeps the weights of the outermost module gathered for the backward pass."""
    model = shard(own_model().eval(), mesh)
    whole = own_model().eval()
    whole(X).square().sum().backward()
    loss = model(X).square().sum()
    assert rows(find_heads(model, X)) == TRUTH
    loss.backward()
    for sharded, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(sharded.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-6)


def test_output_projections_are_found_under_fsdp2(mesh):
    model = shard(own_model(), mesh)
    groups = find_heads(model, X)
    layers = {name: [group for group in groups if group.name.startswith(name)] for name in ("0", "1")}
    assert trace_output_projections(model, layers, X) == {"0": "0.merge", "1": "1.merge"}
    assert all(hasattr(parameter, "placements") for parameter in model.parameters())


def test_conv1d_is_known_when_it_is_sharded_itself(mesh):
    """`fully_shard` gives the module a class of another name."""
    pytest.importorskip("transformers")
    model, _ = build("gpt2 with cross-attention, sdpa")
    heads = find_heads(model)
    columns = output_groups(model, heads)
    shard(model, mesh, *(module for module in model.modules() if type(module).__name__ == "Conv1D"))
    assert rows(find_heads(model)) == rows(heads)
    assert [group.slices[0].axis for group in output_groups(model, heads)] == [c.slices[0].axis for c in columns]


def test_classes_without_heads_are_known_when_they_are_sharded_themselves(mesh):
    class AutoformerAttention(Interleaved):
        """A name that the table lists as having no heads."""

    model = nn.Sequential(AutoformerAttention(), Interleaved())
    shard(model, mesh, model[0])
    assert rows(find_heads(model, X)).keys() == {"1.q", "1.k", "1.v"}


def test_weights_that_stay_distributed_are_refused_with_a_remedy(mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    part = shard(own_model(), mesh)[0]  # sharded by its parent
    with pytest.raises(UnsupportedWeights, match=r"mix.weight: .*before the model is distributed.*groups="):
        find_heads(part, X)
    model = own_model()
    groups = find_heads(model, X)
    plan = {"0.mix": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
    for call in (find_heads, verify_heads):
        with pytest.raises(UnsupportedWeights, match=r"0.mix.weight: .*tensor parallel"):
            call(model, X)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = repel(model, optimizer, groups=groups, verbose=False)
    model(X).square().mean().backward()
    optimizer.step()
    assert handle.steps == 1


@pytest.mark.parametrize("wrap", ["ddp", "compile", "compile in place", "ddp of compile", "compile of fsdp2"])
def test_heads_are_proved_inside_wrappers(mesh, wrap):
    model = own_model()
    if wrap == "compile in place":
        model.compile(backend="eager")
    elif wrap == "compile of fsdp2":
        shard(model, mesh, *model)
    if "compile" in wrap and wrap != "compile in place":
        model = torch.compile(model, backend="eager")
    if "ddp" in wrap:
        model = nn.parallel.DistributedDataParallel(model)
    groups = find_heads(model, X)
    assert rows(groups) == TRUTH and {group.proof for group in groups} == {"proved"}


@pytest.mark.parametrize("call", [find_heads, verify_heads])
def test_fsdp1_is_refused_by_name(mesh, call):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(own_model(), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedWeights, match=r"FSDP1.*fully_shard"):
        call(model, X)
    model = FullyShardedDataParallel(own_model(), device_id=torch.device("cpu"), use_orig_params=True)
    assert len(call(model, X)) == len(TRUTH)  # in one process these parameters keep their shapes


def test_a_monitor_of_sharded_weights_measures_training_passes_only(mesh):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    shard(model, mesh, *model.layers)
    x = torch.randn(3, 6, 8)
    with pytest.raises(UnsupportedWeights, match="leave probe out"):
        HeadMonitor(model, probe=x)
    with HeadMonitor(model, every=1) as monitor:
        model(x).sum().backward()
        monitor.step()
    assert [len(measurement.layers) for measurement in monitor.history] == [2]


def test_weights_in_einsum_notation_are_proved_and_ablated_under_fsdp2(mesh):
    whole, model = Stack(), Stack()
    shard(model, mesh, *model.layers)
    heads = Heads(model, einsum_inputs)
    assert set(heads.proofs().values()) == {"proved"}
    assert [layer.projection for layer in heads.layers] == ["layers.0.W_O", "layers.1.W_O"]
    with heads.ablated([(0, 1)]):
        ablated = model(einsum_inputs)
    with torch.no_grad():
        whole.layers[0].W_O[1] = 0
    torch.testing.assert_close(ablated, whole(einsum_inputs))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(RuleError, match=r"layers\.0\.W_Q: .* does not support sharded weights in einsum notation"):
        repel(model, optimizer, SVGD(space="logits"), example_inputs=einsum_inputs, verbose=False)

"""Settings and layers that repulsion between logits refuses by name, and layers without tokens, which warn."""

import warnings

import pytest
import torch
from torch import nn

from repulsive import SVGD, find_heads, repel
from repulsive.errors import RuleError
from tests.repulsion.logits.models import ids, own
from tests.repulsion.logits.small_decoder import RULE, Attention, Decoder, make, train

VALUES = SVGD("heads", 0.05, space="logits", circuits="qk+ov", tokens=64, every=2)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class Reversed(nn.Module):
    def forward(self, x):
        return x.flip(-1)


def adapted(model: nn.Module, *modules: str, **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=list(modules), init_lora_weights=False, **settings)
    model = peft.get_peft_model(model, config)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def test_dora_is_refused():
    model, optimizer = adapted(Decoder(), "q_proj", "k_proj", use_dora=True)
    with pytest.raises(RuleError, match="DoRA"):
        repel(model, optimizer, RULE, allow_unproved=True)


def test_lora_on_torch_attention_is_refused():
    model, optimizer = adapted(encoder(), "self_attn")
    with pytest.raises(RuleError, match=r"LoRA on nn\.MultiheadAttention"):
        repel(model, optimizer, RULE)


def test_an_adapter_on_the_output_projection_is_refused_with_value_circuits():
    model, optimizer = adapted(Decoder(), "q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(RuleError, match=r"layers\.0\.o_proj\.weight: .* adapter on the output projection"):
        repel(model, optimizer, VALUES, allow_unproved=True)
    handle = repel(model, optimizer, RULE, allow_unproved=True, verbose=False)
    assert {group.part for group in handle.groups} == {"q", "k"}


def test_an_adapter_on_values_only_is_allowed_with_value_circuits():
    model, optimizer = adapted(Decoder(), "v_proj")
    with pytest.warns(UserWarning, match="frozen"):
        repel(model, optimizer, VALUES, allow_unproved=True, verbose=False)
    before = model.base_model.model.layers[0].v_proj.lora_B["default"].weight.clone()
    train(model, optimizer, range(1))
    assert not torch.equal(model.base_model.model.layers[0].v_proj.lora_B["default"].weight, before)


@pytest.mark.parametrize(
    ("parts", "particle", "rule", "message"),
    [
        ("qk", "projection", VALUES, r"layers\.0\.self_attn: circuits='qk\+ov' needs the groups q, k and v"),
        ("v", "projection", VALUES, "Select q and k"),
        ("qkv", "head", VALUES, "particle='projection'"),
        ("qkv", "head", RULE, "particle='projection'"),
    ],
)
def test_groups_without_the_needed_parts_are_refused(parts, particle, rule, message):
    model = encoder()
    groups = find_heads(model, parts=parts, particle=particle)
    with pytest.raises(RuleError, match=message):
        repel(model, torch.optim.AdamW(model.parameters()), rule, groups=groups)


def test_strided_groups_are_refused():
    model = encoder()
    with pytest.raises(RuleError, match="leave particle and layout out"):
        repel(model, torch.optim.AdamW(model.parameters()), RULE, groups=find_heads(model, layout="strided"))


def test_an_output_projection_that_names_do_not_show_is_refused_with_the_remedy():
    model = own().model
    groups = find_heads(model, ids())
    with pytest.raises(
        RuleError, match=r"1\.v: .* no output projection for 4 heads of 3 features; pass example_inputs="
    ):
        repel(model, torch.optim.AdamW(model.parameters()), VALUES, groups=groups)
    model[1].mix = nn.Sequential(Reversed(), model[1].mix)  # the slices of its input are not those of the heads
    with pytest.raises(RuleError, match=r"1\.v: .* for 4 heads of 3 features; choose circuits='qk'"):
        repel(model, torch.optim.AdamW(model.parameters()), VALUES, example_inputs=ids())
    repel(model, torch.optim.AdamW(model.parameters()), RULE, example_inputs=ids(), verbose=False)


def test_finding_an_output_projection_changes_nothing():
    model = own().model.train()
    model[1].vals.requires_grad_(False)
    model.append(nn.Dropout(0.5))
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"1\.v \(frozen\)"):
        handle = repel(nn.DataParallel(model), torch.optim.AdamW(model.parameters()), VALUES, example_inputs=ids())
    outputs = [group.slices[0].parameter_name for group in handle.groups if group.part == "o"]
    assert outputs == ["1.mix.weight", "2.mix.weight"]
    assert torch.equal(torch.get_rng_state(), state) and all(module.training for module in model.modules())
    assert not model[1].vals.weight.requires_grad and all(p.grad is None for p in model.parameters())


def test_an_output_projection_is_not_trusted_for_its_name():
    model = own().model
    model[1].proj = nn.Linear(12, 12).double()  # a usual name, but it projects the inputs
    model[1].register_forward_pre_hook(lambda module, args: module.proj(args[0]))
    handle = repel(model, torch.optim.AdamW(model.parameters()), VALUES, example_inputs=ids(), verbose=False)
    outputs = [group.slices[0].parameter_name for group in handle.groups if group.part == "o"]
    assert outputs == ["1.mix.weight", "2.mix.weight"]


def test_graph_attention_is_refused_although_it_has_queries_and_keys():
    layers = pytest.importorskip("torch_geometric.nn")
    model = nn.Sequential(layers.TransformerConv(8, 4, heads=2))
    with pytest.raises(RuleError, match=r"0\.q: TransformerConv attends along the edges of a graph, .*space='sphere'"):
        repel(model, torch.optim.AdamW(model.parameters()), RULE)


class Functional(Attention):
    """Uses the weights of its projections without calling them, as BEiT of timm does."""

    def forward(self, x):
        weights = (layer.weight for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = ((x @ weight.T).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for weight in weights)
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_projections_that_are_not_called_as_modules_are_named():
    model = Decoder()
    model.layers = nn.ModuleList(Functional(16, 4) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters())
    repel(model, optimizer, RULE, allow_unproved=True, verbose=False)
    message = r"layers\.0 ran, but did not call its projections as modules: choose space='sphere'"
    with pytest.warns(UserWarning, match=message):
        train(model, optimizer)


def test_layers_without_queries_are_left_out_of_value_circuits():
    from repulsive.lab.systems.classification.model import AdditiveAttention

    model = nn.ModuleDict({"additive": AdditiveAttention(8, 6, 3), "encoder": encoder()})
    handle = repel(model, torch.optim.AdamW(model.parameters()), VALUES, verbose=False)
    assert {group.name for group in handle.groups} == {f"encoder.layers.0.self_attn.{part}" for part in "qkvo"}


def test_attention_with_other_widths_of_keys_and_values_moves_all_biases():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)

        def forward(self, query, key, value):
            return self.attention(query, key, value)[0]

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-30)
    repel(model, optimizer, VALUES, verbose=False)
    (model(torch.randn(3, 4, 8), torch.randn(3, 5, 6), torch.randn(3, 5, 5)) * 0).sum().backward()
    optimizer.step()
    q, k, v = model.attention.in_proj_bias.grad.chunk(3)
    assert q.norm() > 1e-6 and v.norm() > 1e-6
    assert k.norm() < 1e-6  # keys are centred, so that their bias has no effect


@pytest.mark.parametrize("rule", [RULE, VALUES])
def test_tensor_parallel_projections_are_refused(rule):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Decoder()
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, dist.init_device_mesh("cpu", (1,)), plan)
        with pytest.raises(RuleError, match=r"layers\.0\..*: .* does not support tensor parallelism"):
            repel(model, torch.optim.AdamW(model.parameters()), rule, allow_unproved=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "child", "message"),
    [
        ("k_sconv", nn.Conv1d(16, 16, 3), r"layers\.0\.k: Attention applies a convolution \(k_sconv\)"),
        ("scaling", nn.Parameter(torch.zeros(4)), r"layers\.0\.q: .* scales each feature of queries .* \(scaling\)"),
        ("logit_scale", nn.Parameter(torch.zeros(4)), r"layers\.0\.q: Attention compares queries and keys by cosine"),
    ],
)
def test_changes_between_projection_and_product_are_refused(name, child, message):
    model = Decoder()
    setattr(model.layers[0], name, child)
    with pytest.raises(RuleError, match=message + r".*space='logits' does not support; .*space='sphere'"):
        repel(model, torch.optim.AdamW(model.parameters()), RULE, allow_unproved=True)


def test_a_batch_norm_after_the_projection_is_refused():
    from transformers import LevitConfig, LevitModel

    config = LevitConfig(
        image_size=32, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8],
        down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 2, 4, 2, 2]],
    )  # fmt: skip
    model = LevitModel(config)
    images = {"pixel_values": torch.randn(2, 3, 32, 32)}
    with pytest.raises(RuleError, match="LevitAttention applies a batch norm to the result of the projection"):
        repel(model, torch.optim.AdamW(model.parameters()), RULE, example_inputs=images)


def test_a_projection_that_returns_a_tuple_is_refused():
    model, optimizer, _ = make()
    model.layers[0].q_proj.register_forward_hook(lambda module, args, output: (output, None), prepend=True)
    with pytest.raises(RuleError, match=r"layers\.0\.q: expected a tensor as the result of Linear, got tuple; exclude"):
        train(model, optimizer, range(1))


def test_a_share_of_the_features_is_refused():
    """As in tensor parallelism that hides the full width from `repel`."""
    model, optimizer, _ = make()
    for layer in model.layers:
        layer.q_proj.register_forward_hook(lambda module, args, output: output[..., :8], prepend=True)
        layer.num_heads = 2
        for name in ("k_proj", "v_proj"):
            getattr(layer, name).register_forward_hook(lambda module, args, output: output[..., :8], prepend=True)
        layer.o_proj = nn.Linear(8, 16)
    with pytest.raises(RuleError, match="tensor parallelism"):
        train(model, optimizer, range(1))


def test_a_layer_in_evaluation_mode_is_named_once():
    model, optimizer, _ = make()
    model.layers[0].eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, range(5))
    assert [str(one.message).partition(". ")[0] for one in caught] == [
        "space='logits': 1 of 2 layers gave no tokens, so their heads were not repelled: layers.0"
    ]
    assert caught[0].filename.endswith("small_decoder.py")  # the line that calls step


def test_a_layer_that_the_model_skips_is_named_after_five_steps():
    model, optimizer, _ = make(SVGD("heads", 0.05, space="logits", tokens=64, every=1))
    model.layers[0].forward = lambda x: x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(4))
    with pytest.warns(UserWarning, match=r"gave no tokens.*: layers\.0\. "):
        train(model, optimizer, range(4, 5))


def test_resuming_with_other_hidden_settings_warns():
    state = make()[2].state_dict()
    for name, value in (("tokens", 128), ("every", 3), ("circuits", "qk+ov")):
        settings = {"tokens": 64, "every": 2, name: value}
        handle = make(SVGD(alpha=0.05, space="logits", **settings))[2]
        if name == "circuits":  # more groups
            assert handle.state_dict()["rule"] != state["rule"]
            continue
        with pytest.warns(UserWarning, match=f"{name}={value}"):
            handle.load_state_dict(state)


def test_impossible_settings_are_refused():
    with pytest.raises(RuleError, match="tokens of a layer"):
        RULE.gradient(torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(RuleError, match="smoothing=0\\.5"):
        SVGD(space="logits", smoothing=0.5)
    with pytest.raises(RuleError, match="only space='logits'"):
        SVGD(tokens=64)
    with pytest.raises(RuleError, match="at least 1"):
        SVGD(space="logits", every=0)
    model, optimizer, _ = make(None)
    with pytest.raises(RuleError, match="moves q and k together"):
        repel(model, optimizer, RULE, parts="qv", allow_unproved=True)
    with pytest.raises(RuleError, match="particle"):
        repel(model, optimizer, RULE, particle="head", allow_unproved=True)


def test_additive_attention_is_refused_by_name():
    from repulsive.lab.systems.classification.model import AdditiveAttention

    model = AdditiveAttention(8, 6, 3)
    with pytest.raises(RuleError, match="Additive and graph attention"):
        repel(model, torch.optim.Adam(model.parameters()), RULE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 1}, "compared between tokens, so at least 2"),
        ({"act_every": 4, "every": 2}, "choose a multiple of 4 for every"),
        ({"act_every": 4, "every": 6}, "choose a multiple of 4 for every"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(RuleError, match=message):
        SVGD("heads", 0.05, space="logits", **settings)
    SVGD("heads", 0.05, space="logits", act_every=4, every=8), SVGD("heads", 0.05, space="logits", act_every=4, every=1)

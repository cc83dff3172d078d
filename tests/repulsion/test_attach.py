"""The effect of one step on the weights, for all layouts and selections."""

import warnings

import pytest
import torch
from torch import nn

from repulsive import SGLD, SVGD, find_heads, repel
from tests.repulsion.unchanged import weights

RULES = [
    SVGD(),
    SVGD(alpha="auto", ratio=0.5),
    SVGD(space="sphere", smoothing=0.0),
    SVGD(kernel="imq", prior="gaussian"),
    SVGD(kernel=lambda x, y: torch.exp(-(x - y).square().sum(-1))),
]


def expect_one_sgd_step(model, groups, rule, lr):
    """The expected weights after one step of plain SGD, from `rule.gradient` on each group."""
    expected = {name: p.detach() - lr * p.grad for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        grads = torch.cat([s.take(s.parameter().grad) for s in group.slices], dim=-1)
        change = rule.gradient(group.read(), grads).split([s.dim for s in group.slices], dim=-1)
        for part, own in zip(group.slices, change, strict=True):
            parameter = part.parameter()
            part.put(expected[names[id(parameter)]], part.take(parameter.detach()) - lr * own)
    return expected


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("particle", ["projection", "head"])
def test_one_step_applies_the_rule_to_each_group_and_nothing_else(rule, particle, make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    repel(model, optimizer, rule, particle=particle, verbose=False)
    backward(model)
    expected = expect_one_sgd_step(model, find_heads(model, particle=particle), rule, 0.3)
    optimizer.step()
    for name, found in model.named_parameters():
        assert torch.allclose(found, expected[name], rtol=1e-12, atol=1e-13), name


def transformers_model(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {**small, "intermediate_size": 24, "max_position_embeddings": 32}
    make = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**common)),
        "gpt2": lambda: transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32)
        ),
        "neox": lambda: transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**common)),
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**common, num_key_value_heads=2)),
    }
    torch.manual_seed(0)
    model = make[kind]().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("kind", ["bert", "gpt2", "neox", "llama"])
@pytest.mark.parametrize("particle", ["projection", "head"])
def test_packed_transposed_interleaved_and_grouped_layouts(kind, particle):
    model = transformers_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = SVGD(alpha=0.5)
    handle = repel(model, optimizer, rule, particle=particle, verbose=False)
    if kind == "llama":
        counts = {group.part: group.num_heads for group in handle.groups}
        assert counts == ({"q": 4, "k": 2, "v": 2} if particle == "projection" else {"qkv": 2})
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids).last_hidden_state.square().mean().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    expected = expect_one_sgd_step(model, handle.groups, rule, 0.1)
    optimizer.step()
    for name, found in model.named_parameters():
        assert torch.allclose(found, expected[name], rtol=1e-11, atol=1e-13), name


def test_only_selected_groups_change(make_model, backward):
    model, plain = make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    repel(model, optimizers[0], SVGD(), layers="first", parts="v", verbose=False)
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        backward(m)
        optimizer.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name == "stack.layers.0.self_attn.in_proj_weight":
            assert torch.equal(a[:32], b[:32])
            assert not torch.isclose(a[32:], b[32:], rtol=1e-9).any()
        else:
            assert torch.equal(a, b), name


def test_rule_none_changes_nothing(make_model, backward):
    model, plain = make_model(), make_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    handle = repel(model, optimizers[0], rule=None, verbose=False)
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        for index in range(3):
            backward(m, index)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(line.drive > 0 and line.distance > 0 and line.repulsion == 0 for line in handle.report())


def test_the_default_rule_is_the_recommended_one(make_model, capsys):
    model = make_model()
    handle = repel(model, torch.optim.Adam(model.parameters(), lr=0.1))
    assert handle.rule == SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4)
    assert "alpha='auto', smoothing=0, space='sphere', ratio=0.01, act_every=4" in capsys.readouterr().err


def test_tied_layers_are_one_group_and_change_once(make_model, backward):
    model = make_model()
    model.stack.layers[1].self_attn.in_proj_weight = model.stack.layers[0].self_attn.in_proj_weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handle = repel(model, optimizer, SVGD(), verbose=False)
    assert [group.name for group in handle.groups] == [f"stack.layers.0.self_attn.{part}" for part in "qkv"]
    backward(model)
    expected = expect_one_sgd_step(model, handle.groups, SVGD(), 0.3)
    optimizer.step()
    for name, found in model.named_parameters():
        assert torch.allclose(found, expected[name], rtol=1e-12), name


def test_lora_heads_are_in_the_trained_part():
    peft = pytest.importorskip("peft")
    model = transformers_model("llama")
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about k, which is frozen
        handle = repel(model, optimizer, SVGD(alpha=0.5), verbose=False)
    assert {group.part for group in handle.groups} == {"q", "v"}
    assert all("lora_B" in s.parameter_name for group in handle.groups for s in group.slices)
    model(input_ids=torch.arange(12).view(2, 6)).last_hidden_state.square().mean().backward()
    before = weights(model)
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)


def test_wrapped_optimizers_and_models(make_model, backward):
    class Wrapper(torch.optim.Optimizer):
        """Like Accelerate's: a subclass that does not call its parent's constructor."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self, closure=None):
            self.optimizer.step(closure)

    model = make_model()
    wrapped = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model)  # compiled lazily, never run here
    handle = repel(compiled, wrapped, verbose=False)
    assert handle.groups[0].name == "stack.layers.0.self_attn.q"
    backward(model)
    wrapped.step()
    assert handle.steps == 1


def test_two_rules_for_the_parts_of_a_packed_projection(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {"qk": SVGD(alpha=1.0), "v": SGLD(1.0, 0.0)}
    handles = [repel(model, optimizer, rule, layers=[0], parts=parts, verbose=False) for parts, rule in rules.items()]
    backward(model)
    expected = expect_one_sgd_step(model, handles[0].groups, rules["qk"], 0.1)
    optimizer.step()
    found = model.stack.layers[0].self_attn.in_proj_weight
    assert torch.allclose(found, expected["stack.layers.0.self_attn.in_proj_weight"], rtol=1e-12)


def test_a_replaced_parameter_is_followed(make_model, backward):
    """Wrappers replace parameters, so these are looked up by name at every step."""
    model = make_model()
    attention = model.stack.layers[0].self_attn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, SVGD(alpha=1.0), layers=[0], verbose=False)
    fresh = nn.Parameter(attention.in_proj_weight.detach().clone())
    for entry in optimizer.param_groups:
        entry["params"] = [fresh if p is attention.in_proj_weight else p for p in entry["params"]]
    attention.in_proj_weight = fresh
    backward(model)
    expected = expect_one_sgd_step(model, handle.groups, SVGD(alpha=1.0), 0.1)
    optimizer.step()
    assert torch.allclose(fresh, expected["stack.layers.0.self_attn.in_proj_weight"], rtol=1e-12)


def test_the_released_layout_and_bandwidth(make_model, backward):
    model = make_model()
    rule = SVGD(0.01, 0.1, bandwidth="released")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, rule, layers="first", layout="strided", verbose=False)
    assert handle.groups[0].slices[0].rows[1].tolist() == [1, 5, 9, 13]
    backward(model)
    expected = expect_one_sgd_step(model, handle.groups, rule, 0.1)
    optimizer.step()
    found = model.stack.layers[0].self_attn.in_proj_weight
    assert torch.allclose(found, expected["stack.layers.0.self_attn.in_proj_weight"], rtol=1e-12)


def test_a_compiled_training_step_gives_the_same_weights():
    """The compiled graph breaks at the hooks."""
    found = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 4, 8, dropout=0.0, batch_first=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = repel(model, optimizer, SVGD(alpha=1.0), verbose=False)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        run, x = wrap(step), torch.randn(2, 3, 16)
        for _ in range(4):
            run(x)
        assert handle.steps == 4 and handle.report()[0].repulsion > 0
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))

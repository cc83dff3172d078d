"""The effect of one step on the weights, for all layouts and selections; and arguments that are refused."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, OptimizerError, RuleError, SelectionError, UnsupportedWeights, find_heads, repel
from repulsive.errors import NoHeadsFound

RULES = [
    SVGD(),
    SVGD(alpha="auto", ratio=0.5),
    SVGD(space="sphere", smoothing=0.0),
    SVGD(kernel="imq", prior="gaussian"),
    SVGD(kernel=lambda x, y: torch.exp(-(x - y).square().sum(-1))),
]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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


def test_frozen_groups_are_left_out_with_a_warning(make_model, backward):
    model = make_model()
    model.stack.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"3 of 6 groups .*stack\.layers\.0\.self_attn\.q \(frozen\)"):
        handle = repel(model, optimizer, verbose=False)
    assert {group.layer for group in handle.groups} == {1}
    backward(model)
    optimizer.step()
    assert handle.steps == 1


def test_parameters_outside_the_optimizer_are_left_out_with_a_warning(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.stack.layers[1].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="not in the optimizer"):
        handle = repel(model, optimizer, verbose=False)
    assert {group.layer for group in handle.groups} == {1}


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


def test_quantised_weights_are_refused_by_name(make_model):
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj = (nn.Linear(8, 8) for _ in range(3))
    model.num_heads = 2
    model.q_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedWeights, match="q_proj"):
        repel(model, torch.optim.SGD(model.k_proj.parameters(), lr=0.1), verbose=False)


def untouched(optimizer):
    return not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"parts": "qx"}, SelectionError, "x"),
        ({"layers": "frist"}, SelectionError, "first"),
        ({"layers": [7]}, SelectionError, "7"),
        ({"groups": []}, SelectionError, "empty"),
        ({"where": "cross"}, SelectionError, "cross"),
        ({"where": "sideways"}, SelectionError, "sideways"),
        ({"particle": "atom"}, SelectionError, "atom"),
        ({"match": "*.nothing"}, SelectionError, "nothing"),
        ({"rule": "SVGD"}, RuleError, "SVGD"),
        ({"order": "clip"}, RuleError, "clip-repel"),
        ({"noise_in": "air"}, RuleError, "parameter"),
        ({"max_norm": -1.0}, RuleError, "max_norm"),
        ({"order": "repel-clip"}, RuleError, "without max_norm clips nothing"),
        ({"measure_every": 0}, RuleError, "measure_every"),
        ({"rule": SPOS(noise="released"), "noise_in": "parameter"}, RuleError, "released"),
    ],
)
def test_bad_input_changes_nothing(options, error, word, make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)
    with pytest.raises(error, match=word):
        repel(model, optimizer, **{"verbose": False, **options})
    assert untouched(optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_an_optimizer_of_another_model_is_refused(make_model):
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="none of the selected heads"):
        repel(model, optimizer, verbose=False)
    assert untouched(optimizer)


def test_frozen_heads_alone_are_refused_with_the_remedy(make_model):
    model = make_model().requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"\(frozen\)\. Unfreeze them; with LoRA, .*target_modules"):
        repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)


def test_a_class_is_not_a_model():
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(SelectionError, match=r"expected a model, an instance of nn\.Module, got the class Transformer"):
        repel(nn.TransformerEncoderLayer, torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(SelectionError, match=r"an instance of nn\.Module, got an object of type str"):
        repel("bert-base-uncased", torch.optim.SGD(parameters, lr=0.1))


def test_no_attention_is_an_error():
    model = nn.Linear(4, 4)
    with pytest.raises(NoHeadsFound, match=r"example_inputs=.*\n.*groups=heads_by_hand\(model"):
        repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)


def test_an_object_that_is_not_an_optimizer_is_refused(make_model):
    with pytest.raises(OptimizerError, match="not a torch optimizer"):
        repel(make_model(), object(), verbose=False)


def test_two_handles_need_different_heads(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = repel(model, optimizer, layers=[0], verbose=False)
    with pytest.raises(OptimizerError, match="already"):
        repel(model, optimizer, verbose=False)
    with pytest.raises(OptimizerError, match="already"):
        repel(model, optimizer, layers=[0], verbose=False)
    second = repel(model, optimizer, SGLD(1.0, 0.0), layers=[1], verbose=False)
    backward(model)
    optimizer.step()
    assert (first.steps, second.steps) == (1, 1)
    first.remove()
    third = repel(model, optimizer, layers=[0], verbose=False)
    assert third.attached and not first.attached


def test_remove_and_with_leave_no_trace(make_model, backward):
    model, plain = make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    with repel(model, optimizers[0], verbose=False) as handle:
        backward(model)
        optimizers[0].step()
    assert untouched(optimizers[0]) and not handle.attached
    handle.remove()  # a second call does nothing
    model.load_state_dict(plain.state_dict())
    optimizers[0].state.clear()
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        backward(m)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_handle_that_never_fired_warns(make_model):
    model = make_model()
    handle = repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    with pytest.warns(UserWarning, match="never took a step"):
        handle.remove()


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


def test_a_weight_in_two_groups_is_refused(make_model):
    model, other = make_model(), make_model(1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    groups = find_heads(model)
    with pytest.raises(SelectionError, match="share weights"):
        repel(model, optimizer, groups=[*groups, groups[0]], verbose=False)
    with pytest.raises(SelectionError, match="share weights"):
        repel(model, optimizer, groups=[*groups, *find_heads(model, particle="head")], verbose=False)
    with pytest.raises(SelectionError, match="2 groups have this name"):
        repel(model, optimizer, groups=[*groups, *find_heads(other)], verbose=False)
    assert not optimizer._optimizer_step_pre_hooks


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


def test_nothing_keeps_a_finished_optimizer_alive(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    repel(model, optimizer, verbose=False)  # only the hooks keep the handle alive
    backward(model)
    optimizer.step()
    watched = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watched() is None


def test_a_copied_model_is_another_model(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptimizerError):
        repel(copy.deepcopy(model), optimizer, verbose=False)


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


class OddAttention(nn.Module):
    """Attention of an unknown class with unusual names of projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_attention = nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})


def test_attention_that_is_left_out_is_named(capsys):
    """Known attention, modules that contain it, and layers that were not selected are not named."""
    model = nn.ModuleDict({"known": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2), "odd": OddAttention()})
    repel(model, torch.optim.SGD(model.parameters(), lr=0.1), layers="first")
    told = "left out, as their head layout is unknown: odd (OddAttention); example_inputs may help"
    assert told in capsys.readouterr().err
    known = model["known"]
    repel(known, torch.optim.SGD(known.parameters(), lr=0.1), layers="first", particle="head")
    assert "left out" not in capsys.readouterr().err


def test_a_layer_that_shares_the_weights_of_another_is_not_named_as_left_out(capsys):
    model = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(3))
    model[2].in_proj_weight = model[0].in_proj_weight
    repel(model, torch.optim.Adam(model.parameters()))
    shown = capsys.readouterr().err
    assert "2 attention layers" in shown and "left out" not in shown


def _encoder(layers: int = 2) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True), layers)


def test_a_removed_handle_changes_nothing():
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, verbose=False)
    model(torch.randn(2, 5, 16)).sum().backward()
    optimizer.step()
    handle.remove()
    with pytest.raises(OptimizerError, match="not attached"):
        handle.apply()


@pytest.mark.parametrize(("first", "second"), [(1.0, None), (None, 1.0), (1.0, 1.0)])
def test_two_handles_do_not_clip_the_same_gradients(first, second):
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, layers=[0], max_norm=first, verbose=False)
    with pytest.raises(OptimizerError, match="each would clip"):
        repel(model, optimizer, layers=[1], max_norm=second, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.remove()
    repel(model, optimizer, layers=[1], max_norm=second, verbose=False)


def test_the_number_of_cached_updates_is_limited():
    model = _encoder(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = repel(model, optimizer, verbose=False)
    for number in range(1, 64):  # every subset of six layers
        optimizer.zero_grad()
        for index, layer in enumerate(model.layers):
            if number >> index & 1:
                layer(torch.randn(2, 3, 16)).square().sum().backward()
        optimizer.step()
    assert handle.steps == 63 and len(handle._updates) <= 16


@pytest.mark.parametrize("seed", [None, 1.5, "1"])
def test_a_seed_is_a_whole_number(seed):
    numpy = pytest.importorskip("numpy")
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuleError, match="whole number"):
        repel(model, optimizer, seed=seed, verbose=False)
    handle = repel(model, optimizer, seed=numpy.int64(3), layers=numpy.arange(1), verbose=False)
    assert type(handle.state_dict()["seed"]) is int and {g.layer for g in handle.groups} == {0}

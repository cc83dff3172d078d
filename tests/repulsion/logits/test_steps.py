"""Repulsion between logits in training loops: sampling, resuming, compiling, schedules, errors."""

import copy
import pickle
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from repulsive import SPOS, SVGD, find_heads, repel
from repulsive.errors import RuleError
from repulsive.particles.logits import Circuits, centre_keys, cosines, mean_and_largest
from repulsive.repulsion.logits.renewal import is_renewed
from repulsive.repulsion.logits.repulsion import NoTokensWarning

RULE = SVGD(alpha=0.05, space="logits", tokens=64, every=2)


class Decoder(nn.Module):
    """A small decoder with two attention layers."""

    def __init__(self, width: int = 16, heads: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(2))
        self.out = nn.Linear(width, 30)
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return self.out(x)


class Attention(nn.Module):
    """Causal attention with separate q, k and v projections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = [p(x).unflatten(-1, (self.num_heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (t.transpose(1, 2) for t in projected)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 30, (6, 10), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make(rule: SVGD | None = RULE, **settings):
    torch.manual_seed(0)
    model = Decoder(**settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = repel(model, optimizer, rule, verbose=False, allow_unproved=True) if rule is not None else None
    return model, optimizer, handle


def train(model, optimizer, steps=range(6), run=None):
    for step in steps:
        loss_of(model if run is None else run, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def similarity(model: nn.Module, layer: int = 1) -> float:
    """Mean cosine between the logits of a layer's heads on new tokens."""
    inputs = {}
    attention = model.layers[layer]
    hook = attention.register_forward_pre_hook(lambda module, args: inputs.update(x=args[0].detach()))
    with torch.no_grad():
        model(batch(99))
        hook.remove()
        q, k = (p(inputs["x"]).unflatten(-1, (4, -1)) for p in (attention.q_proj, attention.k_proj))
        products = Circuits(q.flatten(0, 1), centre_keys(k).flatten(0, 1)).products()
    return float(mean_and_largest(cosines(products))[0])


def with_similar_heads(model: Decoder) -> Decoder:
    """Make the heads of each layer near copies of each other."""
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                rows = p.weight.unflatten(0, (4, -1))
                rows.copy_(rows[:1] + 0.3 * rows)
    return model


def test_the_force_lowers_the_similarity_of_logits():
    plain, optimizer, _ = make(None)
    train(with_similar_heads(plain), optimizer, range(30))
    repelled, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=64, every=2))
    train(with_similar_heads(repelled), optimizer, range(30))
    assert similarity(repelled) < similarity(plain) - 0.2
    report = handle.report()[-1]
    at_step_0 = similarity(with_similar_heads(make(None)[0]))
    assert report.similarity == pytest.approx(at_step_0, abs=0.2)


def test_alpha_zero_does_not_lower_the_similarity():
    """The same training with alpha = 0 shows that the test above detects the force."""
    plain, optimizer, _ = make(None)
    train(with_similar_heads(plain), optimizer, range(30))
    without, optimizer, _ = make(SVGD(alpha=0.0, space="logits", tokens=64, every=2))
    train(with_similar_heads(without), optimizer, range(30))
    assert similarity(without) == pytest.approx(similarity(plain), abs=0.05)


def test_activation_checkpointing_gives_the_same_weights():
    assert torch.equal(train(*make()[:2]), train(*make(checkpointed=True)[:2]))


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_models_are_sampled(order):
    expected = train(*make()[:2])
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    repel(compiled if order == "after" else model, optimizer, RULE, verbose=False, allow_unproved=True)
    torch.testing.assert_close(train(model, optimizer, run=compiled), expected)


def test_gradient_accumulation_uses_the_tokens_of_the_last_pass():
    model, optimizer, handle = make()
    loss_of(model, batch(7)).backward()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    forces = [w.force.clone() for w in handle._logits.held[0].sides[0]]
    other, optimizer, handle = make()
    loss_of(other, batch(0)).backward()
    optimizer.step()
    for one, two in zip(forces, handle._logits.held[0].sides[0], strict=True):
        torch.testing.assert_close(one, two.force)


def test_scaled_gradients_get_a_scaled_force():
    model, _, handle = make(SVGD(alpha=0.05, space="logits", tokens=64))
    loss_of(model, batch(0)).backward()
    handle.apply()
    plain = [p.grad.clone() for p in model.parameters()]
    model, _, handle = make(SVGD(alpha=0.05, space="logits", tokens=64))
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(loss_of(model, batch(0))).backward()
    handle.apply(scaler)
    for one, two in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(two.grad / 512, one)


def test_evaluation_and_inference_are_not_sampled():
    model, _, handle = make()
    sampler = handle._logits.sampler
    model.eval()
    loss_of(model, batch(0)).backward()
    assert sampler.samples == {}
    model.train()
    with torch.no_grad():
        model(batch(0))
    assert sampler.samples == {}
    model(batch(0))
    assert len(sampler.samples) == 4


def test_transforms_of_torch_func_are_not_sampled():
    model, optimizer, handle = make()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values, ids):
        logits = torch.func.functional_call(model, values, (ids,))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def probe():
        torch.func.grad(loss)(parameters, batch(0))
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch(0).unsqueeze(1))

    probe()
    assert handle._logits.sampler.samples == {}
    loss_of(model, batch(1)).backward()
    taken = {key: sample.outputs for key, sample in handle._logits.sampler.samples.items()}
    probe()
    assert all(sample.outputs is taken[key] for key, sample in handle._logits.sampler.samples.items())
    optimizer.step()
    assert handle.steps == 1 and handle.report()[0].ratio > 0


def test_a_step_without_tokens_warns_once():
    model, optimizer, _ = make()
    model.eval()
    with pytest.warns(UserWarning, match="no tokens were seen") as caught:
        train(model, optimizer, range(1))
    assert [one.filename for one in caught] == [__file__]  # the line that calls step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))


def test_tokens_of_a_pass_before_a_state_was_loaded_are_not_used():
    model, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=16, every=1))
    state = handle.state_dict()
    loss_of(model, batch(0)).backward()
    assert handle._logits.sampler.samples
    handle.load_state_dict(state)
    with pytest.warns(NoTokensWarning, match="no tokens were seen"):
        optimizer.step()


def test_a_resumed_run_samples_the_positions_of_the_saved_seed():
    rule = SVGD(alpha=0.05, space="logits", tokens=16, every=1)
    model, optimizer, handle = make(rule)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    expected = train(model, optimizer, range(2, 4))
    again, optimizer, _ = make(None)
    handle = repel(again, optimizer, rule, seed=7, verbose=False, allow_unproved=True)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    assert torch.equal(train(again, optimizer, range(2, 4)), expected)


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_resuming_gives_identical_weights(stop):
    expected = train(*make(SVGD(alpha=0.05, space="logits", tokens=64, every=4))[:2], range(8))
    model, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=64, every=4))
    train(model, optimizer, range(stop))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    again, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=64, every=4))
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    assert torch.equal(train(again, optimizer, range(stop, 8)), expected)


def test_tokens_are_not_saved():
    model, optimizer, handle = make()
    train(model, optimizer, range(3))
    state = handle.state_dict()
    shapes = {tuple(t.shape) for forces in state["forces"].values() for t in forces}
    assert shapes == {(4, 4, 16), (4, 4), (6,)}  # weight and bias by heads, and the scalars of the force
    assert set(state) == {"format", "steps", "seed", "rule", "groups", "start", "forces"}


def test_the_force_is_recomputed_every_few_steps():
    model, optimizer, handle = make(SVGD(alpha=0.05, space="logits", tokens=64, every=3))
    forces = []
    for step in range(7):
        train(model, optimizer, range(step, step + 1))
        forces.append(handle._logits.held[1].sides[0][0].force.clone())
    changed = [not torch.equal(a, b) for a, b in pairwise(forces)]
    assert changed == [False, False, True, False, False, True]


def test_auto_recomputes_often_at_first_and_rarely_later():
    steps = [step for step in range(10_000) if is_renewed(step, "auto")]
    assert steps[:101] == list(range(101))
    assert len(steps) == 346
    assert all(after - before <= max(1, before / 50) for before, after in pairwise(steps))
    assert is_renewed(steps[200], "auto") and not is_renewed(steps[200] + 1, "auto")  # also for earlier steps


def test_hooks_are_registered_only_for_steps_that_need_tokens():
    model, optimizer, _ = make(SVGD(alpha=0.05, space="logits", tokens=64, every=3))
    counts = []
    for step in range(4):
        counts.append(sum(len(m._forward_hooks) for m in model.modules()))
        train(model, optimizer, range(step, step + 1))
    assert counts == [4, 0, 0, 4]


def test_a_schedule_that_ends_removes_the_force():
    def alpha(step: int) -> float:
        return 0.05 if step < 3 else 0.0

    model, optimizer, handle = make(SVGD(alpha=alpha, space="logits", tokens=64, every=2))
    train(model, optimizer, range(3))
    assert handle._logits.held
    train(model, optimizer, range(3, 8))
    assert not handle._logits.held
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0


def test_auto_alpha_keeps_the_ratio():
    model, optimizer, handle = make(SVGD(alpha="auto", ratio=0.3, space="logits", tokens=64))
    train(model, optimizer, range(1))
    assert [round(r.ratio, 4) for r in handle.report()] == [0.3] * 4


@pytest.mark.parametrize("noise_in", ["gradient", "optimizer"])
def test_spos_adds_noise_only_to_q_and_k(noise_in):
    models = []
    for temperature in (0.0, 0.05):
        model, optimizer, _ = make(None)
        rule = SPOS(alpha=0.05, space="logits", tokens=64, beta=1e3, temperature=temperature)
        repel(model, optimizer, rule, noise_in=noise_in, verbose=False, allow_unproved=True)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        models.append(model)
    same = {
        n: torch.equal(p.grad, q.grad) if noise_in == "gradient" else torch.equal(p, q)
        for (n, p), (_, q) in zip(*(model.named_parameters() for model in models), strict=True)
    }
    assert {n for n, equal in same.items() if not equal} == {
        f"layers.{layer}.{part}_proj.weight" for layer in (0, 1) for part in "qk"
    }


def test_queries_are_repelled_if_keys_are_frozen():
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        layer.k_proj.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with pytest.warns(UserWarning, match="frozen"):
        handle = repel(model, optimizer, RULE, verbose=False, allow_unproved=True)
    loss_of(model, batch(0)).backward()
    before = model.layers[0].q_proj.weight.grad.clone()
    handle.apply()
    assert not torch.allclose(model.layers[0].q_proj.weight.grad, before * 0.1 / 4, rtol=1e-3)
    assert model.layers[0].k_proj.weight.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_a_model_with_hooks_says_what_to_do():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    handle = repel(model, torch.optim.AdamW(model.parameters()), RULE, verbose=False)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(AttributeError, match=r"cannot compile the hooks of space='logits': call handle.remove\(\)"):
            torch.jit.script(one)
    handle.remove()
    torch.jit.script(model)


def test_copies_of_the_model_are_not_sampled():
    model, _, handle = make()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other.train(), batch(0)).backward()
        assert handle._logits.sampler.samples == {}


def test_remove_removes_the_hooks():
    model, optimizer, handle = make()
    train(model, optimizer, range(1))
    handle.remove()
    hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert hooks == []


def test_one_head_and_equal_heads_stay_finite():
    torch.manual_seed(0)
    model = Decoder(heads=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="one head"):
        repel(model, optimizer, RULE, groups=find_heads(model), verbose=False, allow_unproved=True)
    assert torch.isfinite(train(model, optimizer)).all()
    model, optimizer, _ = make()
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                p.weight.unflatten(0, (4, -1)).copy_(p.weight.unflatten(0, (4, -1))[:1].clone())
                p.bias.zero_()
    with pytest.warns(UserWarning, match="all heads of a group are equal"):
        assert torch.isfinite(train(model, optimizer, range(2))).all()


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
@pytest.mark.parametrize("circuits", ["qk", "qk+ov"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factors", [(1, 1, 1, 1), (1, 2, 4, 8), (1, -1, 1, -1)], ids=str)
@pytest.mark.parametrize("alpha", [0.01, "auto"])
def test_parallel_functions_exert_no_force(alpha, factors, dtype, circuits):
    """The rounding error that is left used to be scaled up, by the bandwidth or to the target ratio."""
    rule = SVGD("heads", alpha, space="logits", circuits=circuits)
    model, optimizer, handle = make(rule)
    model.to(dtype)
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj, layer.v_proj):
                p.weight.unflatten(0, (4, -1)).copy_(p.weight.unflatten(0, (4, -1))[:1].clone())
                p.bias.zero_()
            layer.o_proj.weight.unflatten(1, (4, -1)).copy_(layer.o_proj.weight.unflatten(1, (4, -1))[:, :1].clone())
            for p in (layer.q_proj, layer.v_proj):
                p.weight.unflatten(0, (4, -1)).mul_(torch.tensor(factors, dtype=dtype)[:, None, None])
    loss_of(model, batch(0)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert all(report.repulsion == 0 for report in handle.report())


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pair_of_equal_heads_is_not_pushed(dtype):
    """The hinge kernel repels no other pair here."""
    model, optimizer, handle = make(SVGD("heads", "auto", kernel="hinge", space="logits"))
    model.to(dtype)
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                p.weight[4:8], p.bias[4:8] = p.weight[:4], p.bias[:4]
    loss_of(model, batch(0)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert [(report.repulsion, report.largest > 0.999) for report in handle.report()] == [(0, True)] * 4


@pytest.mark.parametrize("kernel", ["rbf", "hinge"])
@pytest.mark.parametrize("apart", [1e-3, 1e-5])
def test_nearly_equal_heads_are_repelled(apart, kernel):
    """The force on float32 weights is that on the same weights in float64."""
    forces = []
    for dtype in (torch.float32, torch.float64):
        model, optimizer, _ = make(SVGD("heads", "auto", kernel=kernel, space="logits"))
        with torch.no_grad():
            for layer in model.layers:
                for p in (layer.q_proj, layer.k_proj):
                    rows = p.weight.unflatten(0, (4, -1))
                    rows.copy_(rows[:1] + apart * rows.flip(0))
                    p.bias.zero_()
        model.to(dtype)
        loss_of(model, batch(0)).backward()
        plain = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        force = [(p.grad - grad).double().flatten() for p, grad in zip(model.parameters(), plain, strict=True)]
        forces.append(torch.cat(force))
    single, double = forces
    assert float(single.norm()) == pytest.approx(float(double.norm()), rel=0.01)
    assert float(torch.cosine_similarity(single, double, dim=0)) > 0.9


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

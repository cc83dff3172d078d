"""Repulsion between logits inside real training loops."""

import copy
import json
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

RULE = SVGD(alpha=0.05, space="logits", tokens=64, every=2)


class Decoder(nn.Module):
    """Two attention layers with separate projections, as many people write them."""

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


def made(rule: SVGD | None = RULE, **settings):
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
    """Mean cosine between the logits of a layer's heads on fresh tokens."""
    seen = {}
    attention = model.layers[layer]
    hook = attention.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].detach()))
    with torch.no_grad():
        model(batch(99))
        hook.remove()
        q, k = (p(seen["x"]).unflatten(-1, (4, -1)) for p in (attention.q_proj, attention.k_proj))
        products = Circuits(q.flatten(0, 1), centre_keys(k).flatten(0, 1)).products()
    return float(mean_and_largest(cosines(products))[0])


def alike(model: Decoder) -> Decoder:
    """Heads that begin as near copies of each other, as trained heads may be."""
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                rows = p.weight.unflatten(0, (4, -1))
                rows.copy_(rows[:1] + 0.3 * rows)
    return model


def test_the_force_lowers_the_similarity_of_logits():
    plain, optimizer, _ = made(None)
    train(alike(plain), optimizer, range(30))
    repelled, optimizer, handle = made(SVGD(alpha=0.05, space="logits", tokens=64, every=2))
    train(alike(repelled), optimizer, range(30))
    assert similarity(repelled) < similarity(plain) - 0.2
    report = handle.report()[-1]
    assert report.similarity == pytest.approx(similarity(alike(made(None)[0])), abs=0.2)  # measured at step 0


def test_without_a_weight_there_is_no_force():
    """The same training as above with alpha = 0: what fails if the force is taken out."""
    plain, optimizer, _ = made(None)
    train(alike(plain), optimizer, range(30))
    idle, optimizer, _ = made(SVGD(alpha=0.0, space="logits", tokens=64, every=2))
    train(alike(idle), optimizer, range(30))
    assert similarity(idle) == pytest.approx(similarity(plain), abs=0.05)


def test_checkpointing_changes_nothing():
    assert torch.equal(train(*made()[:2]), train(*made(checkpointed=True)[:2]))


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_models_are_sampled(order):
    expected = train(*made()[:2])
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    repel(compiled if order == "after" else model, optimizer, RULE, verbose=False, allow_unproved=True)
    torch.testing.assert_close(train(model, optimizer, run=compiled), expected)
    torch.compiler.reset()


def test_accumulated_passes_use_the_tokens_of_the_last():
    model, optimizer, handle = made()
    loss_of(model, batch(7)).backward()
    loss_of(model, batch(0)).backward()
    optimizer.step()
    forces = [w.force.clone() for w in handle._logits.held[0].sides[0]]
    other, optimizer, handle = made()
    loss_of(other, batch(0)).backward()
    optimizer.step()
    for one, two in zip(forces, handle._logits.held[0].sides[0], strict=True):
        torch.testing.assert_close(one, two.force)


def test_scaled_gradients_get_a_scaled_force():
    model, _, handle = made(SVGD(alpha=0.05, space="logits", tokens=64))
    loss_of(model, batch(0)).backward()
    handle.apply()
    plain = [p.grad.clone() for p in model.parameters()]
    model, _, handle = made(SVGD(alpha=0.05, space="logits", tokens=64))
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(loss_of(model, batch(0))).backward()
    handle.apply(scaler)
    for one, two in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(two.grad / 512, one)


def test_evaluation_and_inference_are_not_sampled():
    model, _, handle = made()
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


def test_a_step_without_tokens_warns_once():
    model, optimizer, _ = made()
    model.eval()
    with pytest.warns(UserWarning, match="no tokens were seen"):
        train(model, optimizer, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_resuming_gives_the_same_bits(stop):
    expected = train(*made(SVGD(alpha=0.05, space="logits", tokens=64, every=4))[:2], range(8))
    model, optimizer, handle = made(SVGD(alpha=0.05, space="logits", tokens=64, every=4))
    train(model, optimizer, range(stop))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    again, optimizer, handle = made(SVGD(alpha=0.05, space="logits", tokens=64, every=4))
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    assert torch.equal(train(again, optimizer, range(stop, 8)), expected)


def test_no_tokens_are_saved():
    model, optimizer, handle = made()
    train(model, optimizer, range(3))
    state = handle.state_dict()
    shapes = {tuple(t.shape) for forces in state["forces"].values() for t in forces}
    assert shapes == {(4, 4, 16), (4, 4), (6,)}  # a weight by heads, a bias, and what was measured of them
    assert set(state) == {"format", "steps", "seed", "rule", "groups", "forces"}


def test_callbacks_that_write_json_leave_the_forces_out():
    from repulsive.integrations.deferred import Deferred

    model, optimizer, _ = made(None)
    deferred = Deferred(RULE, {"verbose": False, "allow_unproved": True})
    deferred.begin(model, [(optimizer, {})])
    train(model, optimizer, range(3))
    assert "forces" in deferred.states()[0]
    assert json.loads(json.dumps(deferred.states(tensors=False)))[0]["steps"] == 3


def test_the_force_is_renewed_every_so_many_steps():
    model, optimizer, handle = made(SVGD(alpha=0.05, space="logits", tokens=64, every=3))
    seen = []
    for step in range(7):
        train(model, optimizer, range(step, step + 1))
        seen.append(handle._logits.held[1].sides[0][0].force.clone())
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, False, True, False, False, True]


def test_auto_renews_often_at_first_and_rarely_later():
    steps = [step for step in range(10_000) if is_renewed(step, "auto")]
    assert steps[:101] == list(range(101))
    assert len(steps) == 346
    assert all(after - before <= max(1, before / 50) for before, after in pairwise(steps))
    assert is_renewed(steps[200], "auto") and not is_renewed(steps[200] + 1, "auto")  # also when asked again, backwards


def test_hooks_are_there_only_for_steps_that_need_tokens():
    model, optimizer, _ = made(SVGD(alpha=0.05, space="logits", tokens=64, every=3))
    counts = []
    for step in range(4):
        counts.append(sum(len(m._forward_hooks) for m in model.modules()))
        train(model, optimizer, range(step, step + 1))
    assert counts == [4, 0, 0, 4]


def test_a_schedule_that_ends_takes_the_force_away():
    def alpha(step: int) -> float:
        return 0.05 if step < 3 else 0.0

    model, optimizer, handle = made(SVGD(alpha=alpha, space="logits", tokens=64, every=2))
    train(model, optimizer, range(3))
    assert handle._logits.held
    train(model, optimizer, range(3, 8))
    assert not handle._logits.held
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0


def test_auto_alpha_holds_the_ratio():
    model, optimizer, handle = made(SVGD(alpha="auto", ratio=0.3, space="logits", tokens=64))
    train(model, optimizer, range(1))
    assert [round(r.ratio, 4) for r in handle.report()] == [0.3] * 4


def test_spos_adds_noise_to_q_and_k_alone():
    quiet = made(SPOS(alpha=0.05, space="logits", tokens=64, beta=1e3, temperature=0.0))
    noisy = made(SPOS(alpha=0.05, space="logits", tokens=64, beta=1e3))
    for model, _, handle in (quiet, noisy):
        loss_of(model, batch(0)).backward()
        handle.apply()
    same = {
        n: torch.equal(p.grad, q.grad)
        for (n, p), (_, q) in zip(quiet[0].named_parameters(), noisy[0].named_parameters(), strict=True)
    }
    assert {n for n, equal in same.items() if not equal} == {
        f"layers.{layer}.{part}_proj.weight" for layer in (0, 1) for part in "qk"
    }


def test_frozen_keys_leave_the_queries_repelled():
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


def test_copies_of_the_model_are_not_sampled():
    model, _, handle = made()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other.train(), batch(0)).backward()
        assert handle._logits.sampler.samples == {}


def test_removing_takes_the_hooks_away():
    model, optimizer, handle = made()
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
    model, optimizer, _ = made()
    with torch.no_grad():
        for layer in model.layers:
            for p in (layer.q_proj, layer.k_proj):
                p.weight.unflatten(0, (4, -1)).copy_(p.weight.unflatten(0, (4, -1))[:1].clone())
                p.bias.zero_()
    with pytest.warns(UserWarning, match="all heads of a group are equal"):
        assert torch.isfinite(train(model, optimizer, range(2))).all()


def test_settings_that_cannot_be():
    with pytest.raises(RuleError, match="tokens of a layer"):
        RULE.gradient(torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(RuleError, match="smoothing=0\\.5"):
        SVGD(space="logits", smoothing=0.5)
    with pytest.raises(RuleError, match="only space='logits'"):
        SVGD(tokens=64)
    with pytest.raises(RuleError, match="at least 1"):
        SVGD(space="logits", every=0)
    model, optimizer, _ = made(None)
    with pytest.raises(RuleError, match="moves q and k together"):
        repel(model, optimizer, RULE, parts="qv", allow_unproved=True)
    with pytest.raises(RuleError, match="particle"):
        repel(model, optimizer, RULE, particle="head", allow_unproved=True)


def test_additive_attention_is_refused_by_name():
    from repulsive.lab.systems.classification.model import AdditiveAttention

    model = AdditiveAttention(8, 6, 3)
    with pytest.raises(RuleError, match="Additive and graph attention"):
        repel(model, torch.optim.Adam(model.parameters()), RULE)

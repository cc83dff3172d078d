"""Repulsion between logits in training loops: similarity, gradient scalers, schedules, noise and resuming."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from repulsive import SPOS, SVGD, repel
from repulsive.particles.logits import Circuits, centre_keys, cosines, mean_and_largest
from repulsive.repulsion.logits.renewal import is_renewed
from tests.repulsion.logits.small_decoder import RULE, Decoder, batch, loss_of, make, train


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

"""Repulsion on Accelerate: gradient accumulation, skipped steps, checkpoints."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
from accelerate import Accelerator

from repulsive import SVGD, UnknownSetting
from repulsive.errors import StateError
from repulsive.integrations.accelerate import repel_prepared
from tests.integrations.training import LOGITS, RULES, encoder, labelled, weights

BATCHES = 4


class Run:
    """One training run, with repulsion attached before or after `accelerator.prepare`."""

    def __init__(self, rule, accumulate=1, attach="after", scaler=None):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        if scaler is not None:
            self.accelerator.scaler = scaler
        model = encoder()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        settings = {"rule": rule, "verbose": False}
        if attach == "before":
            self.handle = repel_prepared(self.accelerator, model, optimizer, **settings)
        loader = DataLoader(labelled(BATCHES * 8), batch_size=8)
        self.model, self.optimizer, self.data = self.accelerator.prepare(model, optimizer, loader)
        if attach == "after":
            self.handle = repel_prepared(self.accelerator, self.model, self.optimizer, **settings)

    def epoch(self, overflow=None):
        """Train one epoch; the loss of batch number `overflow` is infinite."""
        for index, (tokens, labels) in enumerate(self.data):
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(tokens), labels)
                self.accelerator.backward(loss * float("inf") if index == overflow else loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("attach", ["before", "after"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_resumed_run_equals_an_uninterrupted_one(rule, attach, tmp_path):
    whole = weights(Run(rule, attach=attach).epoch().epoch().model)
    Run(rule, attach=attach).epoch().accelerator.save_state(str(tmp_path))
    assert json.loads((tmp_path / "repulsive.json").read_text())["steps"] == BATCHES

    resumed = Run(rule, attach=attach)
    resumed.accelerator.load_state(str(tmp_path))
    assert torch.equal(weights(resumed.epoch().model), whole)
    assert resumed.handle.steps == 2 * BATCHES
    assert not torch.equal(weights(Run(None).epoch().epoch().model), whole)


def test_forces_between_logits_are_saved_beside_the_state(tmp_path):
    whole = weights(Run(LOGITS).epoch().epoch().model)
    Run(LOGITS).epoch().accelerator.save_state(str(tmp_path))
    modes = {(tmp_path / name).stat().st_mode for name in ("repulsive.json", "repulsive.forces")}
    assert len(modes) == 1  # that of the umask

    resumed = Run(LOGITS)
    resumed.accelerator.load_state(str(tmp_path))
    assert torch.equal(weights(resumed.epoch().model), whole)

    (tmp_path / "repulsive.forces").unlink()
    resumed = Run(LOGITS)
    resumed.accelerator.load_state(str(tmp_path))
    assert not torch.equal(weights(resumed.epoch().model), whole)


def test_a_file_with_forces_of_another_checkpoint_is_not_read(tmp_path):
    run = Run(LOGITS).epoch()
    run.accelerator.save_state(str(tmp_path))
    (tmp_path / "repulsive.forces").rename(tmp_path / "other")
    run.epoch().accelerator.save_state(str(tmp_path))  # 8 steps
    (tmp_path / "other").rename(tmp_path / "repulsive.forces")  # of 4 steps
    resumed = Run(LOGITS)
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.handle.steps == 2 * BATCHES and "forces" not in resumed.handle.state_dict()

    resumed.handle.load_state_dict({**resumed.handle.state_dict(), "steps": 5})  # the next step computes a new force
    resumed.accelerator.save_state(str(tmp_path))
    assert not (tmp_path / "repulsive.forces").exists()


def test_damaged_forces_are_refused_by_name(tmp_path):
    Run(LOGITS).epoch().accelerator.save_state(str(tmp_path))
    (tmp_path / "repulsive.forces").write_bytes(b"damaged")
    with pytest.raises(StateError, match=r"repulsive.forces: the forces are damaged .* or delete this file"):
        Run(LOGITS).accelerator.load_state(str(tmp_path))

    (tmp_path / "repulsive.json").write_text("[]")
    with pytest.raises(StateError, match="not the state of a handle"):
        Run(LOGITS).accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_checkpoint_without_state_warns_and_gives_another_result(rule, tmp_path):
    whole = weights(Run(rule).epoch().epoch().model)
    Run(rule).epoch().accelerator.save_state(str(tmp_path))
    (tmp_path / "repulsive.json").unlink()
    resumed = Run(rule)
    with pytest.warns(UserWarning, match="made without repulsion"):
        resumed.accelerator.load_state(str(tmp_path))
    assert not torch.equal(weights(resumed.epoch().model), whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_acts_once_per_optimizer_step(accumulate):
    run = Run(RULES["svgd"], accumulate=accumulate)
    stepped = []
    run.optimizer.optimizer.register_step_post_hook(lambda *_: stepped.append(run.handle.steps))
    run.epoch()
    assert stepped == list(range(1, BATCHES // accumulate + 1))


def test_a_step_skipped_by_the_scaler_is_not_counted():
    run = Run(RULES["spos"], scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000))
    run.epoch(overflow=2)
    assert run.handle.steps == BATCHES - 1
    assert weights(run.model).isfinite().all()


def test_the_rule_gets_unscaled_gradients():
    scaled = Run(RULES["svgd"], scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000))
    assert torch.equal(weights(scaled.epoch().model), weights(Run(RULES["svgd"]).epoch().model))


def test_each_handle_has_a_file_and_a_removed_one_has_none(tmp_path):
    accelerator = Accelerator(cpu=True)
    pairs = []
    for rule in (SVGD(alpha=0.1), SVGD(alpha=0.2)):
        model = encoder()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        pairs.append((optimizer, repel_prepared(accelerator, model, optimizer, rule=rule, verbose=False)))
        accelerator.backward(model(labelled(8).tensors[0]).sum())
        optimizer.step()
    accelerator.save_state(str(tmp_path / "both"))
    states = [json.loads((tmp_path / "both" / name).read_text()) for name in ("repulsive.json", "repulsive_1.json")]
    assert [state["rule"] for state in states] == [handle.state_dict()["rule"] for _, handle in pairs]

    pairs[1][1].remove()
    accelerator.save_state(str(tmp_path / "one"))
    assert [path.name for path in (tmp_path / "one").glob("repulsive*")] == ["repulsive.json"]
    accelerator.load_state(str(tmp_path / "both"))
    assert [handle.attached for _, handle in pairs] == [True, False]


def test_a_handle_that_replaces_another_takes_its_file(tmp_path):
    """As after unfreezing heads: a resumed script attaches one handle, which expects the first file."""
    run = Run(RULES["svgd"]).epoch()
    run.handle.remove()
    run.handle = repel_prepared(run.accelerator, run.model, run.optimizer, rule=RULES["svgd"], verbose=False)
    run.epoch().accelerator.save_state(str(tmp_path))
    assert [path.name for path in tmp_path.glob("repulsive*")] == ["repulsive.json"]
    resumed = Run(RULES["svgd"])
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.handle.steps == BATCHES
    assert torch.equal(weights(resumed.epoch().model), weights(run.epoch().model))


def test_handles_keep_their_files_when_an_earlier_one_is_removed(tmp_path):
    accelerator, handles = Accelerator(cpu=True), []
    for _ in range(2):
        model = encoder()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        handles.append(repel_prepared(accelerator, model, optimizer, rule="paper", verbose=False))
        accelerator.backward(model(labelled(8).tensors[0]).sum())
        optimizer.step()
    handles[0].remove()
    accelerator.save_state(str(tmp_path))
    assert [path.name for path in tmp_path.glob("repulsive*")] == ["repulsive_1.json"]


def test_a_handle_that_is_attached_again_does_not_write_the_file_of_its_successor(tmp_path):
    accelerator, handles = Accelerator(cpu=True), []
    for alpha in (0.1, 0.2):
        model = encoder()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        handles.append(repel_prepared(accelerator, model, optimizer, rule=SVGD(alpha=alpha), verbose=False))
        accelerator.backward(model(labelled(8).tensors[0]).sum())
        optimizer.step()
        if len(handles) == 1:
            handles[0].remove()
    handles[0].attach()
    accelerator.save_state(str(tmp_path))
    saved = {path.name: json.loads(path.read_text())["rule"] for path in tmp_path.glob("repulsive*")}
    first, second = (handle.state_dict()["rule"] for handle in handles)
    assert saved == {"repulsive.json": second, "repulsive_1.json": first}


@pytest.mark.parametrize("content", [b'{"format": 1, "ste', b"\xff\xfe", b""])
def test_a_damaged_file_is_refused_by_name(content, tmp_path):
    run = Run(RULES["svgd"])
    run.accelerator.save_state(str(tmp_path))
    (tmp_path / "repulsive.json").write_bytes(content)
    with pytest.raises(StateError, match=r"repulsive\.json: the state is damaged .* load an earlier checkpoint"):
        run.accelerator.load_state(str(tmp_path))


def test_apply_before_clipping_handles_scaled_gradients():
    """Float16 gradients are still scaled in `apply`, because `accelerator.clip_grad_norm_` unscales them later."""
    results = []
    for scale in (None, 65536.0):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        run = Run(SVGD(alpha=1.0), scaler=scaler)
        (tokens, labels) = next(iter(run.data))
        run.accelerator.backward(nn.functional.cross_entropy(run.model(tokens), labels))
        run.handle.apply()
        if scaler is not None:
            scaler.unscale_(run.handle.optimizer)  # as clip_grad_norm_ does with mixed_precision="fp16"
        results.append((all_gradients(run.model), run.handle.report()[0].ratio))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=1e-4)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)


def all_gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_rules_by_name_and_unknown_arguments():
    assert Run("sphere").handle.rule == SVGD(
        "heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4
    )
    accelerator, model = Accelerator(cpu=True), encoder()
    with pytest.raises(UnknownSetting, match="alpha is a setting of SVGD"):
        repel_prepared(accelerator, model, torch.optim.Adam(model.parameters()), alpha=0.1)

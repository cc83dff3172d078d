"""Repulsion in the Trainer of transformers: resuming, clipping order, logs and warnings."""

import json
import warnings
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import Trainer, TrainerCallback, TrainingArguments

from repulsive import SVGD, RuleError, SelectionError, StateError
from repulsive.integrations.transformers import STATE_KEY, RepulsiveCallback
from repulsive.repulsion import Until, unwrap_optimizer
from tests.integrations.training import LOGITS, RULES, Copies, llama, step_by_hand, weights

STEPS, STOP = 6, 3


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def make_trainer(folder, *callbacks, **overrides) -> Trainer:
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": STOP,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **overrides,
    }
    return Trainer(llama(), TrainingArguments(str(folder), **options), train_dataset=Copies(32), callbacks=[*callbacks])


def quiet(rule, **settings) -> RepulsiveCallback:
    return RepulsiveCallback(rule, verbose=False, measure_every=2, **settings)


def trained(folder, rule, **overrides) -> torch.Tensor:
    trainer = make_trainer(folder, quiet(rule), **overrides)
    trainer.train()
    return weights(trainer.model)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Weights after a run with a rule, or with none, that nothing interrupts; each is trained once."""
    return cache(lambda rule: trained(tmp_path_factory.mktemp("whole"), rule))


@pytest.mark.parametrize(
    "elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["same folder", "another folder"]
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_resumed_run_equals_an_uninterrupted_one(rule, elsewhere, uninterrupted, tmp_path):
    make_trainer(tmp_path / "half", quiet(rule), StopAt(STOP)).train()

    callback = quiet(rule)
    trainer = make_trainer(tmp_path / ("new" if elsewhere else "half"), callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "half" / f"checkpoint-{STOP}") if elsewhere else True)
    assert torch.equal(weights(trainer.model), uninterrupted(rule))
    assert callback.handle.steps == STEPS
    assert not torch.equal(uninterrupted(rule), uninterrupted(None))


def test_forces_between_logits_are_saved_beside_the_state(uninterrupted, tmp_path):
    whole, half = uninterrupted(LOGITS), tmp_path / "half"
    make_trainer(half, quiet(LOGITS), StopAt(STOP)).train()
    make_trainer(tmp_path / "other", quiet(LOGITS), StopAt(STOP), seed=1).train()  # has a checkpoint of the same step
    checkpoint = str(half / f"checkpoint-{STOP}")

    def resumed(folder, path) -> torch.Tensor:
        trainer = make_trainer(folder, quiet(LOGITS))
        trainer.train(resume_from_checkpoint=path)
        return weights(trainer.model)

    assert not torch.equal(resumed(tmp_path / "new", checkpoint), whole)  # the Trainer does not tell the path
    assert not torch.equal(resumed(tmp_path / "other", checkpoint), whole)
    assert torch.equal(resumed(half, True), whole)
    assert torch.equal(resumed(half, checkpoint), whole)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_checkpoint_without_state_warns_and_gives_another_result(rule, uninterrupted, tmp_path):
    make_trainer(tmp_path / "half", quiet(rule), StopAt(STOP)).train()
    path = tmp_path / "half" / f"checkpoint-{STOP}" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state["stateful_callbacks"].pop(STATE_KEY)[0]["steps"] == STOP
    path.write_text(json.dumps(state))

    trainer = make_trainer(tmp_path / "half", quiet(rule))
    with pytest.warns(UserWarning, match="made without repulsion"):
        trainer.train(resume_from_checkpoint=True)
    assert not torch.equal(weights(trainer.model), uninterrupted(rule))


def test_callback_states_restored_by_the_trainer_do_not_replace_ours(uninterrupted, tmp_path):
    options = {"restore_callback_states_from_checkpoint": True}
    make_trainer(tmp_path / "half", quiet(RULES["spos"]), StopAt(STOP)).train()
    trainer = make_trainer(tmp_path / "half", quiet(RULES["spos"]), **options)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(weights(trainer.model), uninterrupted(RULES["spos"]))


def test_a_checkpoint_of_other_heads_is_refused_and_hooks_are_removed(tmp_path):
    make_trainer(tmp_path, quiet(RULES["svgd"]), StopAt(STOP)).train()
    callback = quiet(RULES["svgd"], layers="first")
    with pytest.raises(StateError, match="other groups"):
        make_trainer(tmp_path, callback).train(resume_from_checkpoint=True)
    assert not callback.handle.attached


@pytest.mark.parametrize("accumulate", [1, 3])
def test_acts_once_per_optimizer_step(accumulate, tmp_path):
    callback = quiet(RULES["svgd"])
    stepped = []

    class CountSteps(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer, **kwargs):
            unwrap_optimizer(optimizer).register_step_post_hook(lambda *_: stepped.append(callback.handle.steps))

    make_trainer(tmp_path, callback, CountSteps(), gradient_accumulation_steps=accumulate, max_steps=4).train()
    assert stepped == [1, 2, 3, 4]


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_clipping_order_matches_a_loop_by_hand(order, tmp_path):
    rule, max_norm = SVGD(alpha=0.5, stepsize=2.0), 0.05
    options = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1, "max_steps": 3}
    callback = quiet(rule, order=order, max_norm=max_norm if order == "repel-clip" else None)
    max_grad_norm = max_norm if order == "clip-repel" else 0.0
    trainer = make_trainer(tmp_path, callback, max_grad_norm=max_grad_norm, per_device_train_batch_size=32, **options)
    trainer.train()

    def by_hand(order):
        model, data = llama(), Copies(32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(input_ids=data.ids, labels=data.ids).loss.backward()
            step_by_hand(model, optimizer, rule, order, max_norm)
        return weights(model)

    other = "repel-clip" if order == "clip-repel" else "clip-repel"
    torch.testing.assert_close(weights(trainer.model), by_hand(order), rtol=1e-4, atol=1e-6)
    assert (by_hand(order) - by_hand(other)).abs().max() > 1e-3  # the two orders differ


def test_repel_then_clip_is_refused_while_the_trainer_clips(tmp_path):
    callback = quiet(RULES["svgd"], order="repel-clip", max_norm=1.0)
    with pytest.raises(RuleError, match="max_grad_norm=0"):
        make_trainer(tmp_path, callback)  # 1.0 is the Trainer's default
    late = make_trainer(tmp_path)
    late.add_callback(callback)
    with pytest.raises(RuleError, match="max_grad_norm=0"):
        late.train()
    with pytest.raises(RuleError, match="clips nothing"):
        make_trainer(tmp_path, quiet(RULES["svgd"], order="repel-clip"), max_grad_norm=0.0)


def test_warns_if_no_step_was_taken_or_the_hooks_were_lost(tmp_path):
    one_epoch = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"}
    make_trainer(tmp_path, quiet(RULES["svgd"]), **one_epoch).train()
    with pytest.warns(UserWarning, match="never fired"):  # the checkpoint is at the end of the epoch
        make_trainer(tmp_path, quiet(RULES["svgd"]), **one_epoch).train(resume_from_checkpoint=True)

    class LoseHooks(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer, **kwargs):
            if state.global_step == 2:
                unwrap_optimizer(optimizer)._optimizer_step_pre_hooks.clear()

    with pytest.warns(UserWarning, match="lost its hooks after 2 steps"):
        make_trainer(tmp_path, quiet(RULES["svgd"]), LoseHooks()).train()


def test_detaches_at_the_end_and_after_an_error(tmp_path):
    class Break(TrainerCallback):
        broken = False

        def on_step_end(self, args, state, control, **kwargs):
            if not self.broken:
                self.broken = True
                raise KeyboardInterrupt

    callback = quiet(RULES["svgd"])
    trainer = make_trainer(tmp_path, callback, Break())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train()
    assert callback.handle.steps == STEPS
    assert not callback.handle.attached


@pytest.mark.parametrize("first", [False, True])
def test_logs_ratio_and_distance(first, tmp_path):
    reported = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            reported.append(dict(logs))

    callback = quiet(SVGD(alpha="auto", ratio=0.2))
    trainer = make_trainer(tmp_path, Reporter(), max_steps=2, save_strategy="no")
    callback.add_to(trainer) if first else trainer.add_callback(callback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["repulsion_ratio"] for entry in logged] == pytest.approx([0.2, 0.2])
    report = callback.handle.report()
    assert logged[-1]["head_distance"] == pytest.approx(sum(line.distance for line in report) / len(report))
    assert logged[-1]["head_similarity"] == pytest.approx(sum(line.similarity for line in report) / len(report))
    assert ["head_distance" in entry for entry in reported if "loss" in entry] == [first, first]


def test_logs_contain_the_step_of_the_measurement(tmp_path):
    callback = RepulsiveCallback("paper", measure_every=3, verbose=False)
    assert callback.handle is None and callback.handles == []
    trainer = make_trainer(tmp_path, callback, save_strategy="no")
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["repulsion_step"] for entry in logged] == [0, 0, 0, 3, 3, 3]
    assert callback.handles == [callback.handle] and callback.handle.rule == SVGD(stepsize=0.1, alpha=0.01)


def test_logs_no_ratio_of_an_earlier_step_when_a_schedule_has_ended(tmp_path):
    callback = RepulsiveCallback(SVGD("heads", Until(2, 0.01), space="logits"), measure_every=1, verbose=False)
    trainer = make_trainer(tmp_path, callback, max_steps=4, save_strategy="no")
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["repulsion_ratio"] > 0 for entry in logged] == [True, True, False, False]
    assert [entry["repulsion_step"] for entry in logged] == [0, 1, 2, 3]
    assert ["head_similarity" in entry for entry in logged] == [True, True, False, False]  # no tokens are sampled


@pytest.mark.parametrize("dies", [5, 99])
def test_warns_when_the_model_has_collapsed(dies, tmp_path):
    """From step `dies` on the gradient is almost 0 and the loss is as high as at the start."""

    class Dying(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * 1e-9 + 9.0 if self.state.global_step >= dies else loss

    callback = RepulsiveCallback(SVGD(), verbose=False, measure_every=1)
    options = {"max_steps": 14, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), learning_rate=1e-2, use_cpu=True, **options)
    trainer = Dying(llama(), arguments, train_dataset=Copies(32), callbacks=[callback])
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.train()
    messages = [str(each.message) for each in caught if "collapsed" in str(each.message)]
    assert len(messages) == (dies < 99) and all(
        message.startswith("step 6: the model has collapsed.") for message in messages
    )


def test_a_short_training_with_strong_repulsion_is_warned_about_at_its_end(tmp_path):
    callback = quiet(SVGD(alpha="auto", ratio=5.0, space="sphere", smoothing=0))

    class StartLater(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            callback.handle.steps = max(98, callback.handle.steps)

    trainer = make_trainer(tmp_path, callback, StartLater(), max_steps=6, save_strategy="no")
    with pytest.warns(
        UserWarning, match=r"step 104: repulsion is stronger than the loss.* is 5\. Choose a smaller ratio"
    ):
        trainer.train()


def test_a_misspelt_argument_fails_at_once():
    with pytest.raises(TypeError, match="layer"):
        RepulsiveCallback(layer="all")
    with pytest.raises(RuleError, match=r"alpha is a setting of SVGD: rule=SVGD"):
        RepulsiveCallback(alpha=0.1)
    with pytest.raises(RuleError, match="did you mean 'sphere'"):
        RepulsiveCallback("shpere")
    with pytest.raises(RuleError, match="verbose='no': must be True, False or None"):
        RepulsiveCallback(verbose="no")
    with pytest.raises(SelectionError, match=r"a list of indices, such as \[3\]"):
        RepulsiveCallback(layers=3)
    with pytest.raises(SelectionError, match="got 'all'; leave groups out"):
        RepulsiveCallback(groups="all")


def test_two_callbacks_resume_their_own_states(tmp_path):
    def both():
        return quiet(RULES["svgd"], layers=[0]), quiet(RULES["spos"], layers=[1])

    whole = make_trainer(tmp_path / "whole", *both())
    whole.train()
    make_trainer(tmp_path / "half", *both(), StopAt(STOP)).train()
    first, second = both()
    trainer = make_trainer(tmp_path / "half", first, second)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(weights(trainer.model), weights(whole.model))
    assert {group.layer for group in first.handle.groups} == {0}
    assert first.handle.steps == second.handle.steps == STEPS


def test_two_callbacks_log_their_own_values(tmp_path):
    first = quiet(SVGD(alpha="auto", ratio=0.2), layers=[0])
    second = quiet(SVGD(alpha="auto", ratio=0.3), layers=[1])
    trainer = make_trainer(tmp_path, first, second)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert logged["repulsion_ratio"] == pytest.approx(0.2)
    assert logged["repulsion_ratio_1"] == pytest.approx(0.3)
    assert logged["head_distance"] != logged["head_distance_1"]

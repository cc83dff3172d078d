"""Repulsion in Lightning: resuming, clipping order, several optimizers, logs and warnings."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer

from repulsive import SVGD, OptimizerError, RuleError, SelectionError, find_heads
from repulsive.integrations.lightning import RepulsiveCallback
from tests.integrations.training import RULES, encoder, labelled, step_by_hand, weights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
BATCHES, BATCH = 4, 8


class Classifier(LightningModule):
    def __init__(self, optimizer="adam") -> None:
        super().__init__()
        self.net = encoder()
        self.kind = optimizer

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class TwoOptimizers(Classifier):
    """Two encoders trained in turn under manual optimisation; the first of three optimizers owns no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.other = encoder()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        chosen = index % 2
        net, optimizer = ((self.net, self.other)[chosen], self.optimizers()[1 + chosen])
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(net(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self):
        answers = [*self.net.answer.parameters(), *self.other.answer.parameters()]
        owners = [answers, list(self.net.layer.parameters()), list(self.other.layer.parameters())]
        return [torch.optim.Adam(parameters, lr=1e-2) for parameters in owners]


def data() -> DataLoader:
    return DataLoader(labelled(BATCHES * BATCH), batch_size=BATCH)


def make_trainer(*callbacks, kind=Trainer, **options) -> Trainer:
    return kind(
        callbacks=[*callbacks],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "log_every_n_steps": 1, **options},
    )


def quiet(rule, **settings) -> RepulsiveCallback:
    return RepulsiveCallback(rule, verbose=False, measure_every=2, **settings)


def fitted(rule, model=None, **options) -> tuple[torch.Tensor, RepulsiveCallback]:
    model, callback = model or Classifier(), quiet(rule)
    make_trainer(callback, **options).fit(model, data())
    return weights(model), callback


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_resumed_run_equals_an_uninterrupted_one(rule, order, tmp_path):
    def fit(epochs, ckpt_path=None):  # whole epochs: Lightning does not resume data within an epoch
        model, callback = Classifier(), quiet(rule, order=order)
        trainer = make_trainer(callback, max_epochs=epochs, gradient_clip_val=0.5)
        trainer.fit(model, data(), ckpt_path=ckpt_path, weights_only=True)
        return trainer, callback, weights(model)

    _, _, whole = fit(2)
    trainer, callback, _ = fit(1)
    assert callback.state_dict()["handles"][0]["steps"] == BATCHES
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, callback, resumed = fit(2, tmp_path / "half.ckpt")
    assert torch.equal(resumed, whole)
    assert callback.handles[0].steps == 2 * BATCHES
    plain, _ = fitted(None, gradient_clip_val=0.5)
    assert not torch.equal(whole, plain)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_checkpoint_without_state_warns_and_gives_another_result(rule, tmp_path):
    whole, _ = fitted(rule)
    model = Classifier()
    trainer = make_trainer(quiet(rule), max_epochs=1)
    trainer.fit(model, data())
    trainer.callbacks.clear()
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    model = Classifier()
    with pytest.warns(UserWarning, match="made without repulsion"):
        make_trainer(quiet(rule)).fit(model, data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert not torch.equal(weights(model), whole)


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_clipping_order_matches_a_loop_by_hand(order):
    rule, max_norm = SVGD(alpha=0.5, stepsize=2.0), 0.05
    model = Classifier("sgd")
    make_trainer(quiet(rule, order=order), gradient_clip_val=max_norm, max_epochs=1).fit(model, data())

    def by_hand(order):
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for tokens, labels in data():
            nn.functional.cross_entropy(model(tokens), labels).backward()
            step_by_hand(model, optimizer, rule, order, max_norm)
        return weights(model)

    other = "repel-clip" if order == "clip-repel" else "clip-repel"
    torch.testing.assert_close(weights(model), by_hand(order), rtol=1e-5, atol=1e-7)
    assert (by_hand(order) - by_hand(other)).abs().max() > 1e-3  # the two orders differ


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_acts_once_per_optimizer_step(order):
    callback = quiet(RULES["svgd"], order=order)
    stepped = []

    class CountSteps(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.optimizers[0].register_step_post_hook(lambda *_: stepped.append(callback.handles[0].steps))

    make_trainer(callback, CountSteps(), accumulate_grad_batches=2).fit(Classifier(), data())
    assert stepped == [1, 2, 3, 4]


def test_attaches_to_each_optimizer_that_owns_heads(tmp_path):
    whole, callback = fitted(RULES["spos"], TwoOptimizers())
    assert [handle.groups[0].name.split(".")[0] for handle in callback.handles] == ["net", "other"]
    assert [handle.steps for handle in callback.handles] == [BATCHES, BATCHES]

    trainer = make_trainer(quiet(RULES["spos"]), max_epochs=1)
    trainer.fit(TwoOptimizers(), data())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    model = TwoOptimizers()
    make_trainer(quiet(RULES["spos"])).fit(model, data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert torch.equal(weights(model), whole)


class TwoWithOneHead(TwoOptimizers):
    """The attention of one encoder, or of both, has a single head."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        for net in (self.net, self.other)[: 1 + both]:
            net.layer = nn.TransformerEncoderLayer(16, 1, 32, dropout=0.0, batch_first=True)


def test_one_head_in_all_groups_of_several_optimizers_is_an_error():
    with pytest.raises(SelectionError, match="6 of 6 groups have one head"):
        make_trainer(quiet("sphere")).fit(TwoWithOneHead(both=True), data())
    with pytest.warns(UserWarning, match="3 of 3 groups have one head"):
        make_trainer(quiet("sphere")).fit(TwoWithOneHead(both=False), data())


def test_groups_for_several_optimizers_are_checked_as_in_repel():
    model = TwoOptimizers()
    with pytest.raises(SelectionError, match="groups is empty"):
        make_trainer(quiet("sphere", groups=[])).fit(model, data())
    with pytest.raises(SelectionError, match=r"write groups=\[group\]"):
        make_trainer(quiet("sphere", groups=find_heads(model)[0])).fit(model, data())
    with pytest.raises(SelectionError, match="layers='first' would be ignored, because groups are given"):
        RepulsiveCallback("sphere", groups=find_heads(model), layers="first")


def test_manual_optimisation_refuses_repel_clip_without_max_norm():
    with pytest.raises(RuleError, match="manual optimisation"):
        make_trainer(quiet(RULES["svgd"], order="repel-clip")).fit(TwoOptimizers(), data())


def test_repel_clip_without_any_clipping_warns():
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, 1.0, "norm")

    callback = quiet(RULES["svgd"], order="repel-clip")
    with pytest.warns(UserWarning, match=r"repel-clip' has no effect, .* set gradient_clip_val .*, or pass max_norm"):
        make_trainer(callback, max_epochs=1).fit(Classifier(), data())
    for model, clip in ((Classifier(), 1.0), (Clips(), None)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*has no effect")
            make_trainer(quiet(RULES["svgd"], order="repel-clip"), max_epochs=1, gradient_clip_val=clip).fit(
                model, data()
            )


def test_manual_optimisation_may_call_apply_before_clipping():
    """The following step must not change the gradients a second time."""

    class Manual(Classifier):
        def __init__(self, early) -> None:
            super().__init__("sgd")
            self.automatic_optimization = False
            self.early = early

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            if self.early:
                callback.handles[0].apply()
            self.clip_gradients(optimizer, gradient_clip_val=1e9, gradient_clip_algorithm="norm")
            optimizer.step()

    results = []
    for early in (False, True):
        callback, model = quiet(RULES["svgd"]), Manual(early)
        make_trainer(callback).fit(model, data())
        assert callback.handles[0].steps == 2 * BATCHES
        results.append(weights(model))
    assert torch.equal(*results)


def test_warns_if_no_step_was_taken_or_the_hooks_were_lost():
    with pytest.warns(UserWarning, match="never began"):
        fitted(RULES["svgd"], limit_train_batches=0)

    class LoseHooks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer.optimizers[0]._optimizer_step_pre_hooks.clear()

    with pytest.warns(UserWarning, match="lost its hooks after 2 steps"):
        make_trainer(quiet(RULES["svgd"]), LoseHooks()).fit(Classifier(), data())

    class NoLoss(Classifier):
        def training_step(self, batch, index):
            return None

    with pytest.warns(UserWarning, match="never fired"):
        fitted(RULES["svgd"], NoLoss())


def test_a_second_fit_without_steps_does_not_blame_the_optimizer_of_the_first():
    callback = quiet(RULES["svgd"])
    trainer = make_trainer(callback)
    trainer.fit(Classifier(), data())
    with pytest.warns(UserWarning, match="never began") as warned:
        trainer.fit(Classifier(), data())  # it has run all its epochs
    assert not [each for each in warned if "lost its hooks" in str(each.message)]
    assert callback.handles[0].steps == 2 * BATCHES  # the report of the first training stays


def test_detaches_at_the_end_and_after_an_error():
    class Broken(Classifier):
        def on_train_batch_end(self, *args):
            raise ArithmeticError

    callback = quiet(RULES["svgd"])
    with pytest.raises(ArithmeticError):
        make_trainer(callback).fit(Broken(), data())
    assert not callback.handles[0].attached
    _, callback = fitted(RULES["svgd"])
    assert not callback.handles[0].attached


def test_logs_ratio_and_distance():
    callback = quiet(SVGD(alpha="auto", ratio=0.2))
    trainer = make_trainer(callback)
    trainer.fit(Classifier(), data())
    report = callback.handles[0].report()
    assert float(trainer.callback_metrics["repulsion_ratio"]) == pytest.approx(0.2)
    distance = sum(line.distance for line in report) / len(report)
    assert float(trainer.callback_metrics["head_distance"]) == pytest.approx(distance)
    similarity = sum(line.similarity for line in report) / len(report)
    assert float(trainer.callback_metrics["head_similarity"]) == pytest.approx(similarity)
    assert float(trainer.callback_metrics["repulsion_step"]) == report[0].step


def test_handle_for_one_optimizer_and_handles_for_several():
    callback = RepulsiveCallback("sphere", verbose=False, layers="first")
    assert callback.handle is None
    make_trainer(callback).fit(Classifier(), data())
    assert callback.handles == [callback.handle] and callback.handle.rule.ratio == 0.01
    make_trainer(callback).fit(TwoOptimizers(), data())
    assert len(callback.handles) == 2
    with pytest.raises(OptimizerError, match="2 optimizers own heads: use `handles`"):
        _ = callback.handle


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("dies", [3, 99])
def test_warns_when_the_model_has_collapsed(dies, by_hand):
    """From step `dies` on the gradient is almost 0 and the loss is as high as at the start."""

    class Dying(Classifier):
        automatic_optimization = not by_hand

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            loss = loss * 1e-9 + 9.0 if self.global_step >= dies else loss
            if by_hand:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return {"loss": loss, "more": "words"}

    callback = RepulsiveCallback(SVGD(), verbose=False, measure_every=1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        make_trainer(callback, max_epochs=3).fit(Dying(), data())
    messages = [str(each.message) for each in caught if "collapsed" in str(each.message)]
    assert len(messages) == (dies < 99) and all(
        message.startswith("step 4: the model has collapsed.") for message in messages
    )


def test_pytorch_lightning_takes_the_same_callback(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Other(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = encoder()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    trainer = make_trainer(quiet(RULES["spos"]), kind=other.Trainer, max_epochs=1)
    trainer.fit(Other(), data())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    model, callback = Other(), quiet(RULES["spos"])
    trainer = make_trainer(callback, kind=other.Trainer)
    trainer.fit(model, data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert callback.handles[0].steps == 2 * BATCHES
    assert torch.equal(weights(model), fitted(RULES["spos"])[0])


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_a_fused_optimizer_gets_scaled_gradients(order):
    """Lightning does not unscale for a fused optimizer, which does so inside its step."""
    from contextlib import nullcontext

    from lightning.pytorch.plugins.precision import MixedPrecision

    class Fused(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5, fused=self.kind == "fused")

    results = []
    for kind in ("fused", "plain"):
        scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))
        scaled.forward_context = nullcontext  # without autocast: only the loss is scaled
        model = Fused(kind)
        make_trainer(quiet(SVGD(alpha=1.0), order=order, max_norm=0.05), plugins=[scaled]).fit(model, data())
        results.append(weights(model))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert not torch.equal(results[0], weights(Classifier()))

"""float16 on a GPU: the rule must handle scaled gradients and steps that are skipped after an overflow."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from repulsive import SVGD
from tests.integrations.training import Copies, encoder, labelled, llama, weights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")]

STEPS = 12
RULE = SVGD(alpha="auto", ratio=0.3)


def scaler(scale: float) -> torch.amp.GradScaler:
    """A gradient scaler; with scale 2^30 the first steps overflow until it has been reduced."""
    return torch.amp.GradScaler("cuda", init_scale=scale, backoff_factor=2.0**-8)


def check(handle, model) -> None:
    """Check that the rule counted the steps that Adam took, and that some steps were skipped."""
    parameter = handle.groups[0].slices[0].parameter()
    assert handle.steps == int(handle.optimizer.state[parameter]["step"])
    assert 0 < handle.steps < STEPS
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_trainer(optim, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from repulsive.integrations.transformers import RepulsiveCallback

    args = TrainingArguments(
        str(tmp_path), max_steps=STEPS, fp16=True, optim=optim, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    callback = RepulsiveCallback(RULE, verbose=False)
    trainer = Trainer(llama(), args, train_dataset=Copies(64), callbacks=[callback])
    trainer.accelerator.scaler = scaler(2.0**30)
    trainer.train()
    check(callback.handle, trainer.model)


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_lightning(order):
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision

    from repulsive.integrations.lightning import RepulsiveCallback

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = encoder()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    model, callback = Classifier(), RepulsiveCallback(RULE, order=order, verbose=False)
    trainer = Trainer(
        max_steps=STEPS,
        callbacks=[callback],
        plugins=[MixedPrecision("16-mixed", "cuda", scaler(2.0**30))],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        devices=1,
    )
    trainer.fit(model, DataLoader(labelled(8 * STEPS), batch_size=8))
    check(callback.handles[0], model)


def accelerated(scale: float, fused: bool):
    from accelerate import Accelerator

    from repulsive.integrations.accelerate import repel_prepared

    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.scaler = scaler(scale)
    model = encoder()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused), DataLoader(labelled(8 * STEPS), batch_size=8)
    )
    handle = repel_prepared(accelerator, model, optimizer, rule=RULE, verbose=False)
    for tokens, labels in data:
        accelerator.backward(nn.functional.cross_entropy(model(tokens), labels))
        optimizer.step()
        optimizer.zero_grad()
    return handle, model


@pytest.mark.parametrize("fused", [False, True])
def test_accelerate(fused):
    pytest.importorskip("accelerate")
    check(*accelerated(2.0**30, fused))


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_does_not_affect_the_rule(fused):
    pytest.importorskip("accelerate")
    small, large = (accelerated(scale, fused)[0] for scale in (1.0, 2.0**10))
    assert small.steps == large.steps == STEPS
    for one, other in zip(small.report(), large.report(), strict=True):
        assert one.drive == pytest.approx(other.drive, rel=0.02)  # float16 has three digits
        assert one.ratio == pytest.approx(other.ratio)

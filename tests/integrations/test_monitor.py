"""The head monitor in the trainers of transformers and TRL, in Lightning and on Accelerate."""

import json
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from repulsive import HeadMonitor, UnknownSetting
from tests.integrations.training import Copies, encoder, labelled, llama, weights


def steps(monitor):
    return [measurement.step for measurement in monitor.history]


def hf_trainer(folder, *callbacks, **overrides):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **overrides,
    }
    return Trainer(
        llama(),
        TrainingArguments(str(folder), **options),
        train_dataset=Copies(32),
        eval_dataset=Copies(8),
        callbacks=[*callbacks],
    )


def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    from repulsive.integrations.transformers import MonitorCallback

    plain = hf_trainer(tmp_path / "plain", eval_strategy="steps", eval_steps=2)
    plain.train()
    callback = MonitorCallback(every=2)
    trainer = hf_trainer(tmp_path / "run", callback, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert torch.equal(weights(plain.model), weights(trainer.model))
    assert steps(callback.monitor) == [0, 2, 4] and len(callback.monitor.history[0].layers) == 2
    logged = {entry["step"]: entry["heads/entropy"] for entry in trainer.state.log_history if "heads/entropy" in entry}
    assert list(logged) == [1, 3, 5]
    assert logged[3] == callback.monitor.history[1].values()["heads/entropy"]
    measured = [entry["heads/step"] for entry in trainer.state.log_history if "heads/step" in entry]
    assert measured == [0.0, 2.0, 4.0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
    saved = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert len(saved["stateful_callbacks"]["repulsive_monitor"]["history"]) == 2

    resumed = MonitorCallback(every=2)
    hf_trainer(tmp_path / "again", resumed).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert steps(resumed.monitor) == [0, 2, 4]
    whole, again = (each.monitor.history[2].layers[0].entropy for each in (callback, resumed))
    assert again == pytest.approx(whole, rel=1e-4)


def test_a_second_training_is_logged_and_saved_like_the_first(tmp_path):
    pytest.importorskip("transformers")
    from repulsive.integrations.transformers import MonitorCallback

    trainer = hf_trainer(tmp_path, MonitorCallback(every=4))
    for _ in range(2):
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "heads/entropy" in entry] == [1, 5]

    trainer = hf_trainer(tmp_path, MonitorCallback(every=50), max_steps=1, save_steps=1)
    for _ in range(2):
        trainer.train()
        saved = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
        assert len(saved["stateful_callbacks"]["repulsive_monitor"]["history"]) == 1


def test_gradient_accumulation_measures_one_micro_batch(tmp_path):
    pytest.importorskip("transformers")
    from repulsive.integrations.transformers import MonitorCallback

    callback = MonitorCallback(every=1)
    hf_trainer(tmp_path, callback, gradient_accumulation_steps=2, max_steps=3).train()
    assert steps(callback.monitor) == [0, 1, 2]


def test_a_misspelt_setting():
    pytest.importorskip("transformers")
    from repulsive.integrations.transformers import MonitorCallback

    with pytest.raises(UnknownSetting, match="no argument 'evry'; did you mean 'every'"):
        MonitorCallback(evry=3)


def test_trainers_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from repulsive.integrations.transformers import MonitorCallback

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    callback = MonitorCallback(every=1)
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none", "disable_tqdm": True}
    trainer = trl.SFTTrainer(
        llama(),
        trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, max_length=8, **options),
        train_dataset=Dataset.from_dict({"text": ["a b c d e", "b c d", "h g f e d c", "a a b"] * 3}),
        processing_class=fast,
        callbacks=[callback],
    )
    trainer.train()
    assert steps(callback.monitor) == [0, 1, 2]


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from repulsive.integrations.lightning import MonitorCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Direct(Classifier):
        """The layers belong to the module itself, which nothing calls."""

        def __init__(self, net):
            super().__init__(nn.Identity())
            self.embed, self.answer = net.embed, net.answer
            self.layers = nn.ModuleList([net.layer, encoder().layer])

        def training_step(self, batch, index):
            x = self.embed(batch[0])
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.answer(x.mean(1)), batch[1])

    def fit(model, *callbacks, **options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = Trainer(callbacks=[*callbacks], max_epochs=1, log_every_n_steps=1, **quiet, **options)
        trainer.fit(model, DataLoader(labelled(32), batch_size=8))
        return trainer

    for kind, layers in ((Classifier, 1), (Direct, 2)):
        callback = MonitorCallback(every=2)
        keep = ModelCheckpoint(tmp_path / kind.__name__, every_n_train_steps=3)
        trainer = fit(kind(encoder()), callback, keep)
        assert steps(callback.monitor) == [0, 2] and len(callback.monitor.history[0].layers) == layers
        assert "heads/entropy" in trainer.callback_metrics
        saved = torch.load(keep.best_model_path, weights_only=False)["callbacks"]["MonitorCallback"]
        assert [each["step"] for each in saved["history"]] == [0, 2]
        plain = kind(encoder())
        fit(plain, enable_checkpointing=False)
        assert torch.equal(weights(plain), weights(trainer.lightning_module))
    accumulated = MonitorCallback(every=1)
    fit(Classifier(encoder()), accumulated, accumulate_grad_batches=2, enable_checkpointing=False)
    assert steps(accumulated.monitor) == [0, 1]


def test_accelerate_saves_the_monitor(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(
        encoder(), torch.optim.Adam(encoder().parameters()), DataLoader(labelled(32), batch_size=8)
    )
    monitor = HeadMonitor(model, every=2)
    accelerator.register_for_checkpointing(monitor)
    for tokens, labels in data:
        accelerator.backward(nn.functional.cross_entropy(model(tokens), labels))
        optimizer.step()
        monitor.step()
    assert steps(monitor) == [0, 2]
    accelerator.save_state(str(tmp_path))
    state = monitor.state_dict()
    monitor.load_state_dict(HeadMonitor(encoder()).state_dict())
    assert steps(monitor) == []
    accelerator.load_state(str(tmp_path))
    assert monitor.state_dict() == state

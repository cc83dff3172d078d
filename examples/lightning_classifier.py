"""Repulsion in Lightning: a small Transformer predicts the most frequent token of a sequence.

    python examples/lightning_classifier.py

The script stops after half of the epochs and resumes from Lightning's checkpoint, which includes the state of
repulsion. Needs `pip install -e '.[lightning]'`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from repulsive import SPOS
from repulsive.integrations.lightning import RepulsiveCallback

TOKENS, LENGTH, WIDTH = 8, 12, 32


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.answer = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.answer(self.encoder(self.embed(tokens)).mean(1))  # [B, TOKENS]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def sequences(count: int, seed: int) -> TensorDataset:
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, nn.functional.one_hot(tokens, TOKENS).sum(1).argmax(1))


def fit(epochs: int, resume: Path | None, save: Path | None) -> None:
    torch.manual_seed(0)
    model = Classifier()
    repulsion = RepulsiveCallback(SPOS(alpha=0.01, beta=1e8), measure_every=10, verbose=resume is None)
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[repulsion],
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(sequences(1024, seed=1), batch_size=64), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    loss = float(trainer.callback_metrics["loss"])
    print(f"after {epochs} epochs: loss {loss:.3f}, {repulsion.handles[0].steps} steps with repulsion")
    for group in repulsion.handles[0].report():
        print(f"  {group.name:24} ratio {group.ratio:5.3f}  distance {group.distance:6.3f}  at step {group.step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "half.ckpt")
        fit(epochs // 2, resume=None, save=checkpoint)
        fit(epochs, resume=checkpoint, save=None)


if __name__ == "__main__":
    main()

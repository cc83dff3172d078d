"""Repulsion in a training loop with Accelerate: gradient accumulation, clipping, saving and loading.

    python examples/accelerate_encoder.py
    torchrun --nproc-per-node 2 examples/accelerate_encoder.py      # on two processes; or `accelerate launch`

A small BERT encoder predicts whether token 0 occurs in a sequence. The script saves half-way, trains to the end, loads
the saved state and trains to the end again. Both results are identical, including the noise of SPOS. Needs
`pip install -e '.[accelerate,transformers]'`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from repulsive import SPOS
from repulsive.integrations.accelerate import repel_prepared

TOKENS, LENGTH = 16, 10


def sequences(count: int) -> TensorDataset:
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, (tokens == 0).any(1).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(sequences(512), batch_size=32)
    )
    rule = SPOS(alpha="auto", ratio=0.1, beta=1e8)
    handle = repel_prepared(accelerator, model, optimizer, rule=rule, measure_every=8)

    def train(count: int) -> float:
        for _ in range(count):
            for tokens, labels in data:
                with accelerator.accumulate(model):
                    loss = model(input_ids=tokens, labels=labels).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        return float(loss.detach())

    def show(when: str, loss: float) -> None:
        ratio = sum(group.ratio for group in handle.report()) / len(handle.groups)
        distance = sum(group.distance for group in handle.report()) / len(handle.groups)
        heads = f"mean ratio {ratio:.3f}  mean distance {distance:.3f}"
        accelerator.print(f"{when:14} loss {loss:.6f}  {handle.steps} steps  {heads}")

    with tempfile.TemporaryDirectory() as local:
        (folder,) = broadcast_object_list([local])  # all processes save into the folder of rank 0
        half = train(epochs // 2)
        accelerator.save_state(folder)
        show("half-way", half)
        end = train(epochs - epochs // 2)
        show("end", end)
        accelerator.load_state(folder)
        again = train(epochs - epochs // 2)
        show("end, resumed", again)
        accelerator.wait_for_everyone()  # before rank 0 removes the folder
    if again != end:
        raise SystemExit(f"resumed training ended with loss {again:.6f}, expected {end:.6f}")


if __name__ == "__main__":
    main()

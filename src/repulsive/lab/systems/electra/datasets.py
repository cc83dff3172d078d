"""The pre-training corpus that can be prepared, with its options."""

from __future__ import annotations

from pathlib import Path

from repulsive.lab.text.dataset import Dataset, Option

LENGTH = 128
DEV = 0.005

PRETRAIN = Dataset(
    "pretrain",
    "A pre-training corpus for ELECTRA and BERT, from text files or OpenWebText's archives.",
    "repulsive.lab.systems.electra.prepare:plan_pretrain",
    (
        Option("vocabulary", Path, "BERT's vocab.txt. Required."),
        Option("length", int, "Length of a block in pieces, [CLS] and [SEP] included.", LENGTH),
        Option("packing", str, "full (no padding), or official (as google-research/electra, with padding).", "full"),
        Option("dev", float, "Share of the documents that go to dev; test gets as many.", DEV),
        Option("lowercase", bool, "Lower-case the texts.", True),
        Option("seed", int, "Random seed.", 0),
        Option("limit", int, "Number of bad lines that may be skipped in a file.", 20),
    ),
    reads="corpus",
    is_parallel=True,
)
DATASETS = (PRETRAIN,)

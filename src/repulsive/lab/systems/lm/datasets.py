"""The texts for language models that can be prepared, with their options."""

from __future__ import annotations

from pathlib import Path

from repulsive.lab.text.dataset import Dataset, Option

DEV = 0.005
_PREPARE = "repulsive.lab.systems.lm.prepare"
_SEED = Option("seed", int, "Random seed.", 0)
_LIMIT = Option("limit", int, "Number of bad lines that may be skipped in a file.", 20)

LM = Dataset(
    "lm",
    "Plain text for language models, as bytes or word pieces.",
    f"{_PREPARE}:plan_text",
    (
        Option("tokenizer", str, "Tokenizer: bytes or wordpiece.", "bytes"),
        Option("vocabulary", Path, "BERT's vocab.txt, for --tokenizer wordpiece."),
        Option("lowercase", bool, "Lower-case the text; for --tokenizer wordpiece only.", True),
        Option("suffix", str, "Extension of the files train, dev and test, if there is one for each part.", "txt"),
        Option("dev", float, "Share of the documents that go to dev; test gets as many.", DEV),
        _SEED,
        _LIMIT,
    ),
    reads="corpus",
)
LM_TOY = Dataset(
    "lm-toy",
    "A generated text with questions that are answered by looking back.",
    f"{_PREPARE}:plan_toy",
    (_SEED, Option("limit", int, "", hidden=True)),
    reads="nothing",
)
DATASETS = (LM, LM_TOY)

"""The GLUE tasks that can be prepared, with their options."""

from __future__ import annotations

from pathlib import Path

from repulsive.lab.text.dataset import Dataset, Option
from repulsive.lab.text.settings import shared_options

LONGEST = 128  # pieces of a text or pair, [CLS] and [SEP] included
STOPS = ("auto", "keep", "final", "all")

GLUE = Dataset(
    "glue",
    "One task of the GLUE benchmark, from its official TSV files.",
    "repulsive.lab.systems.glue.prepare:plan_glue",
    (
        Option("glue_task", str, "Task: cola, sst, mrpc, sts, qqp, mnli, qnli or rte. Required.", flag="--task"),
        Option("vocabulary", Path, "vocab.txt of the model to fine-tune, or the model's folder. Required."),
        Option("held_out", float, "Share of the training set that becomes dev; 0: dev is the official dev set.", 0.0),
        Option("stops", str, "Full stops to remove: keep, final, all, or auto (MNLI: those that train lacks).", "auto"),
        *shared_options(
            tokenizer={"hidden": True},
            lowercase={"help": "Lower-case the texts, as for uncased models."},
            minimum={"hidden": True},
            most={"hidden": True},
            longest={
                "help": "Maximum length of a text or pair in pieces, marks included.",
                "default": LONGEST,
            },
            vectors={"hidden": True},
            size={"hidden": True},
            half_vectors={"hidden": True},
        ),
    ),
    folder_option="glue_task",
)
DATASETS = (GLUE,)

"""Rows of the pre-training study, and conventions for its runs."""

from __future__ import annotations

METHODS = {
    "ma": "MA",
    "svgd": "RMA (SVGD)",
    "strided": "RMA, released slices",
    "svgd-sphere": "RMA, on the sphere",
    "control-scaled": "control: gradient x eps/M",
    "control-smoothed": "control: alpha = 0",
    "bert": "BERT",
}
BASELINE = "ma"
AFTER_MNLI = "rte-mnli"
LONGEST = (
    "sst",
    "sts",
    "qqp",
    "qnli",
    "mnli",
    "cola",
    "rte",
    "mrpc",
    AFTER_MNLI,
)  # tasks of fine-tuning, the longest first
SEEDS = 100  # fine-tunings of the pre-training with seed n have seeds from 100 n on
WARM_UP = 0.05  # share of the steps of a pre-training; the recipe's warm-up is for a million steps

"""The rows of the study of pre-training, and what its runs are called."""

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
LONGEST = ("sst", "sts", "qqp", "qnli", "mnli", "cola", "rte", "mrpc", AFTER_MNLI)  # fine-tunings, the longest first
SEEDS = 100  # fine-tunings of one pre-training have seeds of their own hundred
WARM_UP = 0.05  # of the steps of a pre-training; the recipe's is for a million of them

"""Criteria that judges answer, and the possible answers."""

from __future__ import annotations

CRITERIA = {
    "structure": "Better organised: each sentence follows from the one before, nothing is repeated.",
    "informativeness": "More relevant information, and nothing false.",
    "grammar": "Fewer language errors, easier to read.",
    "overall": "The better text overall.",
}
CHOICES = ("left", "tie", "right")

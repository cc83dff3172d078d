"""What judges are asked, and what they can answer."""

from __future__ import annotations

CRITERIA = {
    "structure": "Well ordered: one sentence leads to the next, nothing is said twice.",
    "informativeness": "Says more of what matters, and nothing that is wrong.",
    "grammar": "Fewer mistakes of language, easier to read.",
    "overall": "All in all the better text.",
}
CHOICES = ("left", "tie", "right")

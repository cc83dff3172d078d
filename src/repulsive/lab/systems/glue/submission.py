"""Format predictions on the GLUE test sets as submission files."""

from __future__ import annotations

from torch import Tensor

from repulsive.lab.systems.glue.data import MOST, GlueTask


def submission(task: GlueTask, answers: Tensor, indices: list[int]) -> str:
    """Return the text of a submission file: a header, then for every row its index and its class name or score.

    Args:
        task: description of the GLUE task.
        answers: logits [N, C], or scores [N], which are clamped to 0 and 5.
        indices: indices of the rows in the test file, N of them.
    """
    if task.classes:
        words = [task.classes[number] for number in answers.argmax(-1).tolist()]
    else:
        words = [f"{points:.3f}" for points in answers.double().clamp(0, MOST).tolist()]
    lines = (f"{index}\t{word}\n" for index, word in zip(indices, words, strict=True))
    return "index\tprediction\n" + "".join(lines)

"""The sentence about an inspection, on hand-made inspections."""

from dataclasses import replace

import pytest
import torch

from repulsive.diagnostics.circuits import Similarity
from repulsive.diagnostics.head_kinds import HeadKinds
from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.output_change import METRICS
from repulsive.diagnostics.redundancy import Ablation
from repulsive.diagnostics.similarity import Diversity
from repulsive.diagnostics.untrained_baseline import AgainstChance, Compared, Null
from repulsive.diagnostics.verdict import looks_untrained, name_layers, redundant_heads, similar_heads, verdict

CHANCE = Null((-0.01, 0.0, 0.01))


def cosines(mean, pair=None):
    """Three heads with this cosine, and heads 0 and 1 with another one."""
    matrix = torch.full((3, 3), mean, dtype=torch.float64).fill_diagonal_(1.0)
    if pair is not None:
        matrix[0, 1] = matrix[1, 0] = pair
    return matrix


def made(means, *, twins=True, importance=None, change=None, metric="states", ov=None):
    """An inspection with one layer of three heads per mean cosine; chance is 0."""
    null = CHANCE if twins else Null()
    names = [f"layer {row}" for row in range(len(means))]

    def compared(circuit, values):
        matrices = [value if isinstance(value, torch.Tensor) else cosines(value) for value in values]
        return [Compared(Similarity(n, circuit, x, 9), null, null) for n, x in zip(names, matrices, strict=True)]

    rows = [[0.577] * 3] * len(means) if importance is None else importance
    ablation = None if change is None else Ablation(tuple(names), 0.0, torch.tensor(change, dtype=torch.float64))
    return Inspection(
        [],
        [(name, row, "encoder", 3) for row, name in enumerate(names)],
        {},
        importance=torch.tensor(rows, dtype=torch.float64),
        ablation=ablation,
        metric="" if change is None else METRICS[metric],
        items=1,
        circuits=AgainstChance(compared("logits", means), compared("ov", ov or [0.0] * len(means))),
    )


def test_redundant_heads_and_similar_layers_are_named():
    change = [[0.2, 0.3, 0.4], [0.009, 0.0, 0.5], [0.002, 0.011, 0.5]]
    inspection = made([0.5, 0.0, 0.0], change=change)
    assert redundant_heads(inspection) == [(1, 0), (1, 1), (2, 0)]
    assert verdict(inspection) == (
        "Layers 1 and 2 have 3 heads the model would not miss (without any one of them its output changes by less than "
        "1 %); heads of layer 0 attend more alike than chance."
    )
    one = made([0.0, -0.4], change=[[0.2, 0.2, 0.2], [0.2, 0.0009, 0.2]], metric="logits")
    assert verdict(one) == (
        "Layer 1 has 1 head the model would not miss (without it its output changes by a KL divergence below 0.001 "
        "nats); heads of layer 1 attend more differently than chance."
    )


def test_without_ablation_importance_is_an_estimate():
    inspection = made([0.0, 0.0], importance=[[0.9, 0.4, 0.05], [0.6, 0.6, 0.06]], ov=[0.5, 0.5])
    assert redundant_heads(inspection) == [(0, 2)]  # the limit is 0.1 / sqrt(3) = 0.0577
    assert verdict(inspection) == "Layer 0 has 1 head that looks unimportant (first-order estimate)."


def test_a_pair_of_heads_is_named_if_the_mean_is_as_chance():
    inspection = made([cosines(-0.45, 0.9), cosines(-0.45, 0.9), 0.0])
    assert verdict(inspection) == "Layers 0 and 1 each have a pair of heads more alike than chance."
    assert similar_heads(inspection) == {(row, head): (1 - head, 0.9) for row in (0, 1) for head in (0, 1)}


def test_heads_that_attend_nearly_alike_are_known_without_twins():
    assert similar_heads(made([cosines(0.1, 0.85), cosines(0.1, 0.75)], twins=False)) == {
        (0, 0): (1, 0.85),
        (0, 1): (0, 0.85),
    }


def test_an_untrained_model_is_recognised():
    inspection = made([0.0, 0.01], change=[[0.0] * 3] * 2)
    assert looks_untrained(inspection)
    assert verdict(inspection).startswith("This model looks untrained: no layer differs from untrained twins")
    assert verdict(made([0.0])).startswith("This model looks untrained: its layer does not differ")
    assert not looks_untrained(made([0.0, 0.01], ov=[0.0, 0.3]))
    scores = {"induction": torch.tensor([[0.9, 0.0, 0.0], [0.0, 0.0, 0.0]])}
    assert not looks_untrained(replace(inspection, kinds=HeadKinds(scores, {"induction": 0.3})))
    assert looks_untrained(replace(inspection, kinds=HeadKinds(scores, {"induction": 0.95})))


def undecided(inspection, **rows):
    """The inspection, with twins but without a result in the given rows of "logits" and "ov"."""
    circuits = inspection.circuits
    for space, chosen in rows.items():
        entries = list(getattr(circuits, space))
        for row in chosen:
            similarity = replace(entries[row].similarity, left_out=torch.empty(0, 3, 3))  # a single sequence
            entries[row] = replace(entries[row], similarity=similarity)
        circuits = replace(circuits, **{space: entries})
    return replace(inspection, circuits=circuits)


def test_a_model_is_not_called_untrained_because_inputs_are_few():
    inspection = made([0.0, 0.0])
    assert looks_untrained(undecided(inspection, logits=[0], ov=[1]))
    text = "This model looks untrained: no layer differs clearly from untrained twins"
    assert verdict(undecided(inspection, logits=[0])).startswith(text)
    few = undecided(inspection, logits=[0, 1], ov=[0])
    assert not looks_untrained(few)
    assert verdict(few) == (
        "Nothing stands out: no head looks unimportant, and the comparison with untrained twins is inconclusive (needs "
        "more inputs)."
    )
    one = Null((0.0,))
    logits = [replace(each, mean=one, largest=one) for each in inspection.circuits.logits]
    alone = replace(inspection, circuits=replace(inspection.circuits, logits=logits, ov=[]))
    assert "inconclusive (needs at least two untrained twins)" in verdict(alone)


def test_nothing_stands_out():
    learned = {"ov": [0.4, 0.4]}
    assert verdict(made([0.0, 0.0], **learned)) == (
        "Nothing stands out: no head looks unimportant, and heads attend as alike as in untrained twins."
    )
    assert verdict(made([0.0, 0.0], change=[[0.1] * 3] * 2, **learned)).startswith(
        "Nothing stands out: no head is redun"
    )
    assert verdict(made([0.7, 0.7], twins=False)) == (
        "Nothing stands out: no head looks unimportant, and heads were not compared with untrained twins."
    )


def test_weights_alone_say_little():
    far = Diversity("layer 0 q", "weights", torch.ones(3, 3), cosines(0.1))
    inspection = Inspection([], [("layer 0", 0, "encoder", 3)], {"weights": [far]})
    assert verdict(inspection).startswith("Only weights were compared") and verdict(inspection).endswith("that.")
    near = replace(inspection, diversity={"weights": [replace(far, cosine=cosines(0.1, 0.97))]})
    assert verdict(near).startswith("Heads 0 and 1 of layer 0 q have nearly the same weights (cosine 0.97)")
    assert redundant_heads(inspection) == [] and similar_heads(inspection) == {}


def test_missing_heads_of_a_narrow_layer_are_not_redundant():
    inspection = made([0.0, 0.0], change=[[0.1, 0.1, 0.1], [0.1, 0.0, float("nan")]], ov=[0.5, 0.5])
    narrow = replace(inspection, layers=[inspection.layers[0], ("layer 1", 1, "encoder", 2)])
    assert redundant_heads(narrow) == [(1, 1)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([3], "layer 3"),
        ([0, 1], "layers 0 and 1"),
        ([0, 2, 4, 5, 6], "layers 0, 2 and 4 to 6"),
        ([0, 2, 4, 6, 8], "5 of the layers 0 to 8"),
    ],
)
def test_layers_are_named_in_few_words(labels, expected):
    assert name_layers([f"layer {number}" for number in labels]) == expected


def test_stacks_and_other_names_of_layers():
    assert (
        name_layers(["encoder layer 0", "encoder layer 1", "cross layer 4"])
        == "encoder layers 0 and 1 and cross layer 4"
    )
    assert name_layers(["a.b", "c.d"]) == "a.b and c.d"
    assert name_layers([f"block{i}" for i in range(9)]) == "block0, block1, block2 and 6 more layers"

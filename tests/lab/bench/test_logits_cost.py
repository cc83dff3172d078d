"""Cost of repulsion between logits on a CPU, in processor time, which other processes on the machine hardly change."""

import statistics
import time

import pytest

from repulsive import SVGD
from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.rules import Case
from repulsive.lab.bench.turns import average
from repulsive.lab.bench.twins import Twin

pytest.importorskip("transformers")


@pytest.mark.slow
def test_logits_cost_at_most_five_percent_of_a_step_of_2048_tokens():
    """A layer of BERT-base and a tiny vocabulary: nearly all of the step is attention and feed-forward layers."""
    preset = find_preset("bert-base")
    sizes = {"layers": 1, "length": 128, "overrides": {"vocab_size": 200}}
    inputs = preset.inputs(preset.build("meta", **sizes).config, 16, 128, "cpu")
    plain, repelled = (
        Twin(preset.build("cpu", **sizes), inputs, case, steps=1) for case in (None, Case(SVGD(space="logits")))
    )
    seconds: dict[str, list[float]] = {"plain": [], "measuring": [], "renewing": [], "ordinary": []}
    for turn in range(4):  # the first warms up
        repelled.begin_turn()
        for kind in repelled.kinds:
            for name, twin in (("plain", plain), (kind, repelled)):
                started = time.process_time()
                twin.step()
                seconds[name] += [time.process_time() - started] if turn else []
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    mean = average(medians["measuring"], medians["ordinary"], medians["renewing"], repelled.renewals)
    print({name: round(value, 4) for name, value in medians.items()}, round(mean / medians["plain"], 4))
    assert mean / medians["plain"] <= 1.05

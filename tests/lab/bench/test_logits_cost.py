"""Cost of repulsion between logits on a CPU, in processor time, which other processes on the machine hardly change."""

import statistics
import time

import pytest

from repulsive import SVGD
from repulsive.lab.bench.participants import Participant, SharedModel
from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.rules import Case
from repulsive.lab.bench.turns import average

pytest.importorskip("transformers")


@pytest.mark.slow
def test_logits_cost_at_most_five_percent_of_a_step_of_2048_tokens():
    """A layer of BERT-base and a tiny vocabulary: nearly all of the step is attention and feed-forward layers."""
    preset = find_preset("bert-base")
    sizes = {"layers": 1, "length": 128, "overrides": {"vocab_size": 200}}
    inputs = preset.inputs(preset.build("meta", **sizes).config, 16, 128, "cpu")
    shared = SharedModel(preset.build("cpu", **sizes), inputs)
    plain, repelled = (Participant(shared, case, steps=1) for case in (None, Case(SVGD(space="logits"))))
    seconds: dict[str, list[float]] = {"plain": [], "measuring": [], "renewing": [], "ordinary": []}

    def step(participant, name):
        started = time.process_time()
        participant.step()
        seconds[name].append(time.process_time() - started)

    for turn in range(4):
        with repelled.attached():
            for kind in repelled.periods:
                step(repelled, kind)
        for _ in repelled.periods:
            step(plain, "plain")
        if turn == 0:  # warm-up
            seconds = {name: [] for name in seconds}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    mean = average(medians["measuring"], medians["ordinary"], medians["renewing"], repelled.renewals)
    print({name: round(value, 4) for name, value in medians.items()}, round(mean / medians["plain"], 4))
    assert mean / medians["plain"] <= 1.05

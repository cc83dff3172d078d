"""Cost of repulsion between logits on a CPU, in processor time, which other processes on the machine hardly change."""

import time
from collections import defaultdict

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
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)

    def step(participant, kind):
        started = time.process_time()
        participant.step()
        seconds[kind, participant is repelled].append(time.process_time() - started)

    for turn in range(4):
        with repelled.attached():
            for kind in repelled.periods:
                step(repelled, kind)
                repelled.handle.remove()
                step(plain, kind)
                repelled.handle.attach()
        if turn == 0:  # warm-up
            seconds.clear()
    least = {key: min(values) for key, values in seconds.items()}  # a busy machine only adds time
    own, other = (
        average(least["measuring", on], least["ordinary", on], least["renewing", on], repelled.renewals)
        for on in (True, False)
    )
    print({key: round(value, 4) for key, value in least.items()}, round(own / other, 4))
    assert own / other <= 1.05

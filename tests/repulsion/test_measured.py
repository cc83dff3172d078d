"""Steps that measure: their numbers, and how many operations they add. On a GPU each operation is a launch."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repulsive import repel
from repulsive.particles.rule import Measure
from repulsive.repulsion.backends.graph_cache import GraphCache
from repulsive.repulsion.growth_monitor import GrowthMonitor
from repulsive.repulsion.measured import FIELDS, Measured
from repulsive.repulsion.measurements import per_step

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
MEASURE_EVERY = 8


class Operations(TorchDispatchMode):
    """Count the operations of a block of code."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def llama():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    return LlamaModel(config)


@pytest.mark.parametrize("rule", ["sphere", "paper"])
def test_a_measurement_of_grouped_heads_is_one_copy(rule, monkeypatch):
    """Query heads and key-value heads have an update each, which is one replay; one copy sends the numbers of both."""
    pytest.importorskip("triton")
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    replays = []
    monkeypatch.setattr(GraphCache, "run", lambda self, launch, key: replays.append(key))
    model = llama().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = repel(model, optimizer, rule, measure_every=MEASURE_EVERY, verbose=False)
    launches = {}
    for _ in range(2):  # the first step of each kind prepares its launches
        for kind, step in (
            ("measuring", 100 * MEASURE_EVERY),
            ("ordinary", 100 * MEASURE_EVERY + handle.rule.act_every),
        ):
            handle.steps = step
            model(torch.arange(8, device=DEVICE).view(1, 8)).last_hidden_state.sum().backward()
            replays.clear()
            with Operations() as operations:
                handle.apply()
            launches[kind] = len(replays) + operations.count
    assert {group.step for group in handle.report()} == {100 * MEASURE_EVERY}
    assert launches == {"ordinary": 2, "measuring": 3}


def test_numbers_of_groups():
    """The rest is computed when a report needs it; a row that belongs to no group counts for nothing."""
    calls = []
    numbers = torch.tensor([[2.0, 1.0], [9.0, 9.0], [0.0, 3.0], [0.0, 0.0]])
    measured = Measured(7, {"q": 0, "k": 0, "v": 2, "o": 3}, numbers, lambda: calls.append(1) or torch.ones(4, 5))
    measured.send()
    numbers.zero_()  # the next step reuses the memory
    assert measured.has_arrived() and measured.ratios() == [0.5, math.inf] and not calls
    assert measured.values("k") == dict.fromkeys(FIELDS, 1.0) | {"drive": 2.0}
    assert measured.values("v")["repulsion"] == 3.0 and calls == [1]


class Late(Measured):
    """Numbers of a device that has not finished them yet."""

    is_finished = False

    def has_arrived(self) -> bool:
        return self.is_finished


def test_growth_is_found_in_numbers_that_arrive_with_the_next_measurement():
    monitor, found, last = GrowthMonitor(), [], None
    for distance in (2.0, 4.0, 6.0, 8.0):
        if last is not None:
            last.is_finished = True
        last = Late(0, {"q": 0}, torch.full((1, 7), distance))
        found.append(monitor.observe([last]))
    assert found == [None, None, None, 3.0]


def test_repulsion_of_several_steps_is_divided():
    fields = [torch.full((2,), float(value), dtype=torch.float64) for value in range(1, 8)]
    for sent in (False, True):
        whole = Measured.of(0, {"q": 0, "k": 1}, Measure(*fields))
        (shared,) = per_step([whole], 4)
        if sent:
            shared.send()
        assert shared.ratios() == [0.5, 0.5] and whole.ratios() == [2.0, 2.0] and shared.distances() == [4.0, 4.0]
        expected = dict(zip(FIELDS, [1.0, 0.5, 3.0, 4.0, 1.25, 6.0, 7.0], strict=True))
        assert shared.values("k") == expected and whole.values("k")["alpha"] == 5.0


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_numbers_are_those_of_the_time_when_they_were_sent():
    numbers = torch.full((1, 7), 2.0, device="cuda")
    torch.cuda._sleep(50_000_000)
    measured = Measured(0, {"q": 0}, numbers)
    measured.send()
    numbers.zero_()
    assert not measured.has_arrived()
    assert measured.values("q") == dict.fromkeys(FIELDS, 2.0) and measured.has_arrived()

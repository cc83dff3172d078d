"""Sharded training equals training in one process: real process groups of 2 and 4, float64, 9 steps."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import start_ranks
from tests.repulsion.sharded_cases import (
    STEPS,
    WORLDS,
    Case,
    alone,
    attach,
    make,
    optimizer_of,
    shard,
    train,
    whole,
)
from tests.repulsion.sharded_probes import HALF, resume, run_all

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot run FSDP2 on a CPU"),
]
SLOW = {world: [pytest.mark.slow] if world > 2 else [] for world in WORLDS}  # more processes than cores
SIZES = [pytest.param(world, marks=SLOW[world]) for world in WORLDS]
RUNS = [pytest.param(world, name, marks=SLOW[world]) for world, cases in WORLDS.items() for name in cases]
HEADS, GROUPS = 4, 6  # of the models whose bytes are counted: two layers of q, k, v
PRODUCTS = GROUPS * (HEADS + 1) ** 2 * 8  # bytes


class Ranks:
    """Results of the ranks by world size. Each world is started once, also with several pytest workers."""

    def __init__(self, folder):
        self.folder = folder
        self._found = {}

    def of(self, world):
        if world not in self._found:
            self._start(world)
            self._found[world] = [torch.load(self.folder / f"{world}-{rank}.pt") for rank in range(world)]
        return self._found[world]

    def _start(self, world):
        done = self.folder / f"{world}.done"
        try:
            (self.folder / f"{world}.started").mkdir(parents=True)
        except FileExistsError:
            for _ in range(2400):
                if done.exists():
                    return
                time.sleep(0.25)
            pytest.fail(f"another worker of pytest started {world} processes and did not finish")
        try:
            start_ranks(run_all, str(self.folder), world, world=world)
        finally:
            done.touch()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    alone_here = "PYTEST_XDIST_WORKER" not in os.environ
    return Ranks(tmp_path_factory.mktemp("r") if alone_here else tmp_path_factory.getbasetemp().parent / "ranks")


def sound(found):
    """The result of a rank; raises its error."""
    if isinstance(found, dict) and "failed" in found:
        pytest.fail(found["failed"])
    return found


def difference(weights, others):
    assert weights.keys() == others.keys()
    return max(float((weights[name].double() - others[name].double()).abs().max()) for name in weights)


def numbers(line):
    return {name: value for name, value in line.items() if isinstance(value, float | int)}


@pytest.mark.parametrize(("world", "name"), RUNS, ids=lambda value: str(value))
def test_shards_train_as_one_process_does(world, name, ranks):
    case = WORLDS[world][name]
    expected = alone(case)
    assert expected["steps"] == STEPS - case.scaled
    for found in (sound(rank[name]) for rank in ranks.of(world)):
        error = difference(found["weights"], expected["weights"])
        print(f"{world} processes, {name}: {error:.1e}")
        assert error <= 1e-10
        assert torch.allclose(found["heads"], expected["heads"], rtol=1e-10)
        assert found["steps"] == expected["steps"]
        for line, own in zip(found["report"], expected["report"], strict=True):
            assert numbers(line) == pytest.approx(numbers(own), rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("world", SIZES)
def test_measures_are_equal_on_all_ranks(world, ranks):
    for name, case in WORLDS[world].items():
        first, *others = [[str(line) for line in sound(rank[name])["report"]] for rank in ranks.of(world)]
        # Every 7 steps. Rules with alpha="auto" measure in every step in which they act.
        measured = 8 if case.rule in ("auto", "recommended") else 7
        assert f"'step': {measured}," in first[0]
        assert all(other == first for other in others)


@pytest.mark.parametrize("world", SIZES)
def test_columns_send_the_products_and_nothing_else(world, ranks):
    for rank in ranks.of(world):
        assert sound(rank["wire"]["columns, spos"]) == [("allreduce_", PRODUCTS)]


@pytest.mark.parametrize("world", SIZES)
def test_rows_send_their_own_share_three_times(world, ranks):
    """One call moves weights and gradients, another moves gradients back; on a CPU torch gathers instead."""
    share = GROUPS * 16 * 16 * 8 // world
    products = PRODUCTS // 3  # of q, k and v joined: two groups
    for rank in ranks.of(world):
        sizes = [size for _, size in sound(rank["wire"]["rows, spos"])]
        assert sizes == [2 * share, products, share]


def test_moving_groups_one_by_one_gives_the_same_weights(ranks):
    """Two groups need twice as many calls."""
    expected = alone(WORLDS[2]["rows, spos"])
    for rank in ranks.of(2):
        found = sound(rank["bunches"])
        assert len(found["wire"]) == 2 * len(rank["wire"]["rows, spos"])
        assert difference(found["weights"], expected["weights"]) <= 1e-10


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("name", HALF)
def test_half_precision_shards(world, name, ranks):
    """bf16: ranks have equal weights, close to the float64 run."""
    expected = alone(WORLDS[world][name])["weights"]
    first, *others = [sound(rank["half"][name]) for rank in ranks.of(world)]
    assert all(value.dtype == torch.bfloat16 for value in first["weights"].values())
    assert all(difference(first["weights"], other["weights"]) == 0 for other in others)
    assert 0 < difference(first["weights"], expected) < 0.05


@pytest.mark.parametrize("world", SIZES)
def test_placements_of_weight_and_gradient(world, ranks):
    """Partial sums, gradients with other placements, two shards of one dimension, 7 columns on 2 ranks; both axes."""
    for rank in ranks.of(world):
        for key, found in rank["placed"].items():
            assert sound(found)["error"] <= 1e-12, key
            assert found["ratios"][1] == pytest.approx(found["ratios"][0], rel=1e-9), key
        assert sound(rank["mixed"]) <= 1e-12


def test_unsupported_sharding_is_refused_by_name(ranks):
    for rank in ranks.of(2):
        texts = sound(rank["refusals"])
        assert all(word in texts["partial_weight"] for word in ("layers.0.q.weight", "Partial", "head_placement"))
        assert all(word in texts["odd_columns"] for word in ("layers.0.q.weight", "(9, 9)", "2 ranks"))
        for case in ("flattened", "flattened_in_place", "flattened_later"):
            assert "FSDP1" in texts[case] and "fully_shard" in texts[case], case
        assert all(word in texts["left_gathered"] for word in ("layers.0.q.weight", "reshard()"))


def test_ranks_prove_heads_with_examples_of_different_sizes(ranks):
    """They need different numbers of forward passes, and must gather weights equally often."""
    first, second = (sound(rank["traced"]) for rank in ranks.of(2))
    assert "the example proves 3 of 6 groups" in first
    assert second == ["proved"] * 6


def test_a_distributed_checkpoint_resumes_to_the_same_numbers(ranks):
    uninterrupted = sound(ranks.of(2)[0]["checkpoint"])
    start_ranks(resume, str(ranks.folder), 2)
    for rank in range(2):
        resumed = sound(torch.load(ranks.folder / f"resumed-{rank}.pt"))
        assert (resumed["at"], resumed["seed"]) == (4, 4)
        assert difference(resumed["weights"], uninterrupted["weights"]) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", [True, False])
def test_a_process_group_of_one(device, columns):
    """The smallest mesh. On a GPU, slices of one shape are stacked, which no other test here covers."""
    from torch.distributed.tensor import init_device_mesh

    case = Case(rule="spos")
    expected = alone(case)["weights"]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x, y = make(case)
        model.to(device)
        shard(model, init_device_mesh(device, (1,)), columns)
        optimizer = optimizer_of(case, model)
        attach(case, model, optimizer)
        train(case, model, optimizer, x.to(device), y.to(device))
        found = {name: value.cpu() for name, value in whole(model).items()}
    finally:
        dist.destroy_process_group()
    assert difference(found, expected) <= 1e-10

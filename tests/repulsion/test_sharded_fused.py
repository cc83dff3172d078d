"""Sharded weights under the Triton kernels: two real processes against one process with whole weights in float64.

Without a GPU the Triton kernels run in Triton's interpreter, over gloo.
"""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("triton")

from tests.repulsion import sharded_cases
from tests.repulsion.sharded_fused_cases import HEADS, RULES, WEIGHTS, Model, Weight, largest_error, steps
from tests.repulsion.sharded_fused_probes import QUICK_RULES, run_quick, run_slow
from tests.repulsion.test_distributed import free_port

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot run FSDP2 on a CPU"),
]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on a CPU without CUDA only")
SLOW_RULES = [pytest.param(rule, marks=pytest.mark.slow) for rule in RULES]


@pytest.fixture(autouse=True)
def same_setting(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "eager")  # set by `steps`, and restored after the test


def start(function, folder):
    mp.spawn(function, args=(free_port(), str(folder), 2), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return start(run_quick, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return start(run_slow, tmp_path_factory.mktemp("slow"))


def sound(found):
    """The result of a rank; raises its error."""
    if isinstance(found, dict) and "failed" in found:
        pytest.fail(found["failed"])
    return found


def check_measured(results, expected):
    for (_, found), (_, wanted) in zip(results, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, numbers in wanted.items():
            for key, value in numbers.items():
                is_equal = math.isclose(found[name][key], value, rel_tol=1e-5, abs_tol=1e-6)
                assert is_equal or (math.isnan(value) and math.isnan(found[name][key])), (name, key)


def check(ranks, key, weights, rule, *, scale=None, joined=False):
    """Gradients and measurements of two steps are those of whole weights, and equal on both ranks."""
    groups = Model(WEIGHTS[weights], joined=joined).groups
    expected = steps(Model(WEIGHTS[weights], joined=joined), RULES[rule], "eager", scale=scale)
    for rank in ranks:
        found = sound(rank[key])
        assert found["used"] == [0, len(groups), False], "the wrong backend ran"
        assert found["eager"] == (rule == "released")
        assert largest_error(found["steps"], expected) < 3e-6
        check_measured(found["steps"], expected)
    first, second = (str([measured for _, measured in rank[key]["steps"]]) for rank in ranks)
    assert first == second


@ON_CPU
@pytest.mark.parametrize("rule", QUICK_RULES)
def test_two_ranks_agree_with_whole_weights(rule, quick):
    """Uneven shards, a weight that one rank has nothing of, two numbers of heads, and rows."""
    check(quick, ("rule", rule), "few and rows", rule)


@ON_CPU
@pytest.mark.parametrize("rule", SLOW_RULES)
def test_every_layout_and_rule(rule, slow):
    check(slow, ("rule", rule), "everything", rule)


@ON_CPU
@pytest.mark.slow
def test_groups_of_weights_that_are_sharded_differently(slow):
    """One group over columns, rows and copies: the products of copies are counted once."""
    check(slow, "joined", "everything", "spos", joined=True)


@ON_CPU
@pytest.mark.slow
def test_scaled_gradients(slow):
    check(slow, "scaled", "everything", "sphere auto", scale=torch.tensor(64.0))


def triangle(heads):
    return (heads + 1) * (heads + 2) // 2


def numbers_sent(weights, of_gradients):
    """Bytes of one all-reduce: a triangle per group, and what is needed of the gradients."""
    extra = {"nothing": lambda heads: 0, "norms": lambda heads: heads + 1, "products": triangle}[of_gradients]
    return 8 * sum(weight.parts * (triangle(weight.heads) + extra(weight.heads)) for weight in weights.values())


@ON_CPU
def test_columns_need_one_all_reduce(quick):
    """Whatever the number of heads. The norms of gradients travel with the products; SGLD sends nothing."""
    few = WEIGHTS["few"]
    assert numbers_sent({"a": Weight(1, 1)}, "norms") == 8 * (15 + 5)  # by hand: 10 + 4 + 1, and 4 + 1
    for rank in quick:
        assert sound(rank["calls", "few", "svgd"]) == [("allreduce_", numbers_sent(few, "nothing"))]
        assert sound(rank["calls", "few", "sphere auto"]) == [("allreduce_", numbers_sent(few, "norms"))]
        assert sound(rank["calls", "few", "sgld"]) == []


@ON_CPU
@pytest.mark.slow
def test_products_of_gradients_are_in_the_same_call(slow):
    columns = WEIGHTS["columns"]
    for rank in slow:
        expected = [("allreduce_", numbers_sent(columns, "products"))]
        assert sound(rank["calls", "columns", "smoothed auto"]) == expected
        assert sound(rank["calls", "columns", "measured"]) == expected
        assert sound(rank["calls", "columns", "ladder"]) == [("allreduce_", numbers_sent(columns, "nothing"))]


@ON_CPU
@pytest.mark.slow
def test_rows_are_moved_around_one_all_reduce(slow):
    """Weights and gradients of one shape in one call, and gradients back; on a CPU torch gathers instead."""
    rows = WEIGHTS["rows"]
    shares = [
        -(-weight.shape[weight.shard] // 2) * math.prod(weight.shape) // weight.shape[weight.shard]
        for weight in rows.values()
    ]
    sent = [4 * share for share in shares]  # bytes, with padding
    for rank in slow:
        sizes = [size for _, size in sound(rank["calls", "rows", "smoothed auto"])]
        assert len(sizes) == 2 * len(rows) + 1
        assert sizes[len(rows)] == numbers_sent(rows, "products")
    total = [sum(size for call, size in rank["calls", "rows", "ladder"] if call != "allreduce_") for rank in slow]
    assert total[0] <= 3 * sum(sent)


@ON_CPU
@pytest.mark.slow
def test_rows_in_small_batches(slow):
    check(slow, "batches", "rows", "svgd")


@ON_CPU
@pytest.mark.slow
def test_ranks_with_different_numbers_of_rows_form_equal_batches(slow):
    """The limit lies between the sizes of the two ranks. If each rank used its own, they would wait for each other."""
    sizes = [sound(rank["uneven batches"])["own"] for rank in slow]
    assert sizes[0] > sizes[1]
    weights = dict.fromkeys("ab", WEIGHTS["rows"]["uneven rows"])
    expected = steps(Model(weights), RULES["svgd"], "eager", count=1)
    assert all(largest_error(rank["uneven batches"]["steps"], expected) < 3e-6 for rank in slow)


@ON_CPU
def test_strides_of_one_rank_do_not_change_the_backend(quick):
    strides = [sound(rank["strides"])["strides"] for rank in quick]
    assert strides[0] != strides[1]
    model = Model({"even": WEIGHTS["columns"]["even"]})
    expected = steps(model, RULES["svgd"], "eager", count=1)
    assert all(largest_error([(rank["strides"]["grads"], {})], expected) < 3e-6 for rank in quick)


@ON_CPU
@pytest.mark.slow
def test_a_weight_may_get_another_placement(slow):
    expected = steps(Model({"even": WEIGHTS["columns"]["even"]}), RULES["svgd"], "eager")
    for rank in slow:
        assert largest_error([(grads, {}) for grads in sound(rank["placement"])], expected) < 3e-6


@ON_CPU
@pytest.mark.slow
def test_half_precision(slow):
    expected = steps(Model(WEIGHTS["columns"], dtype=torch.bfloat16), RULES["svgd"], "eager")
    for rank in slow:
        found = sound(rank["half"])["steps"]
        wanted = [({name: grad.double() for name, grad in grads.items()}, measured) for grads, measured in expected]
        assert largest_error(found, wanted) < torch.finfo(torch.bfloat16).eps


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["auto", "spos"])
@pytest.mark.parametrize("columns", [True, False])
def test_training_under_fsdp2(columns, rule, slow):
    """Three steps of SGD with `repel`, measured at steps 0 and 2, against float64 in one process."""
    case = sharded_cases.Case(columns=columns, rule=rule)
    model, x, y = sharded_cases.make(case)
    optimizer = sharded_cases.optimizer_of(case, model)
    handle = sharded_cases.attach(case, model, optimizer, measure_every=2)
    sharded_cases.train(case, model, optimizer, x, y, steps=3)
    expected = sharded_cases.found(model, handle)
    for rank in slow:
        found = sound(rank["trained", columns, rule])
        assert found["fused"] and found["steps"] == 3
        for name, weight in expected["weights"].items():
            assert float((found["weights"][name].double() - weight).norm() / weight.norm()) < 3e-6
        for line, own in zip(found["report"], expected["report"], strict=True):
            assert line["step"] == 2
            assert line["ratio"] == pytest.approx(own["ratio"], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "released"])
def test_on_a_gpu(rule):
    """A mesh of one process over NCCL, with all layouts: launches, captured graphs and replays around the all-reduce.

    The mesh has one rank, so it covers the code on a GPU; the sums over ranks are covered by the tests on the CPU.
    """
    from torch.distributed.tensor import init_device_mesh

    from repulsive.repulsion.backends.choose import Update

    weights = WEIGHTS["everything"]
    expected = steps(Model(weights, device="cuda"), RULES[rule], "eager", count=5)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Model(weights, init_device_mesh("cuda", (1,)), torch.float32, "cuda")
        update = Update(model.groups, seed=7)
        found = steps(model, RULES[rule], "triton", count=5, update=update)
        assert update._sharded is not None and len(update._sharded.groups) == len(model.groups)
        if rule != "ladder":
            locals_ = [local for batch in update._sharded._batches for r in batch._reductions for local in r.updates]
            assert all(local._graphs._graphs for local in locals_), "nothing was captured"
    finally:
        dist.destroy_process_group()
    assert largest_error(found, expected) < 3e-6
    check_measured(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [True, False])
def test_fsdp2_on_a_gpu(columns):
    """`fully_shard` and `repel` on one GPU against unsharded float64 training, without waiting for the GPU."""
    from torch.distributed.tensor import init_device_mesh

    case = sharded_cases.Case(columns=columns, rule="auto")
    model, x, y = sharded_cases.make(case)
    optimizer = sharded_cases.optimizer_of(case, model)
    sharded_cases.attach(case, model, optimizer)
    sharded_cases.train(case, model, optimizer, x, y, steps=5)
    expected = sharded_cases.whole(model)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x, y = sharded_cases.make(case, torch.float32)
        model.to("cuda")
        sharded_cases.shard(model, init_device_mesh("cuda", (1,)), columns)
        optimizer = sharded_cases.optimizer_of(case, model)
        handle = sharded_cases.attach(case, model, optimizer)
        sharded_cases.train(case, model, optimizer, x.cuda(), y.cuda(), steps=5)
        assert handle._updates.current._sharded is not None and handle._updates.current._eager_rest is None
        found = {name: value.cpu().double() for name, value in sharded_cases.whole(model).items()}
    finally:
        dist.destroy_process_group()
    assert all(float((found[name] - weight).norm() / weight.norm()) < 1e-5 for name, weight in expected.items())
    assert HEADS == 4

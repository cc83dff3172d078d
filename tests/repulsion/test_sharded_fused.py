"""Sharded weights under the Triton kernels: two real processes against one process with whole weights in float64.

Without a GPU the Triton kernels run in Triton's interpreter, over gloo.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.ranks import start_ranks
from tests.repulsion import sharded_cases
from tests.repulsion.sharded_fused_cases import RULES, WEIGHTS, Model, Weight, largest_error, steps
from tests.repulsion.sharded_fused_probes import QUICK_RULES, run_quick, run_slow

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot run FSDP2 on a CPU"),
]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on a CPU without CUDA only")


@pytest.fixture(autouse=True)
def same_setting(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "eager")  # set by `steps`, and restored after the test


def start(function, folder):
    start_ranks(function, str(folder), 2)
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
    """The first two steps are measured; the eager update measures `alpha="auto"` in every step."""
    assert not any(step.measured for step in results[2:])
    for step, wanted in zip(results[:2], expected[:2], strict=True):
        assert step.measured.keys() == wanted.measured.keys()
        for name, numbers in wanted.measured.items():
            for key, value in numbers.items():
                number = step.measured[name][key]
                is_equal = math.isclose(number, value, rel_tol=1e-5, abs_tol=1e-6)
                assert is_equal or (math.isnan(value) and math.isnan(number)), (name, key, number, value)


def check(ranks, key, weights, rule, *, scale=None, joined=False):
    """Gradients and measurements of all steps are those of whole weights, and equal on both ranks."""
    model = Model(WEIGHTS[weights], joined=joined)
    expected = steps(model, RULES[rule], "eager", scale=scale)
    for rank in ranks:
        found = sound(rank[key])
        assert found["used"] == [0, len(model.groups), False], "the wrong backend ran"
        assert found["eager"] == (rule == "released")
        assert largest_error(found["steps"], expected) < 3e-6
        check_measured(found["steps"], expected)
    first, second = ([str(step.measured) for step in rank[key]["steps"]] for rank in ranks)
    assert first == second


@ON_CPU
@pytest.mark.parametrize("rule", QUICK_RULES)
def test_two_ranks_agree_with_whole_weights(rule, quick):
    """Uneven shards, a weight that one rank has nothing of, two numbers of heads, and rows."""
    check(quick, ("rule", rule), "few and rows", rule)


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule, slow):
    check(slow, ("rule", rule), "few and rows", rule)


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sphere auto", "spos"])
def test_every_layout(rule, slow):
    check(slow, ("all", rule), "everything", rule)


@ON_CPU
@pytest.mark.slow
def test_a_group_of_weights_that_are_sharded_differently(slow):
    """One group over columns, rows and copies: the products of copies are counted once."""
    check(slow, "joined", "everything", "spos", joined=True)


@ON_CPU
@pytest.mark.slow
def test_a_mesh_of_two_dimensions(slow):
    """Both dimensions split columns: products are summed over one dimension, then over the other."""
    check(slow, "two dimensions", "few", "spos")
    assert all(len(some) == 2 for rank in slow for some in sums(rank, "two dimensions"))


@ON_CPU
@pytest.mark.slow
def test_scaled_gradients(slow):
    check(slow, "scaled", "everything", "sphere auto", scale=torch.tensor(64.0))


def triangle(heads):
    return (heads + 1) * (heads + 2) // 2


def bytes_summed(weights, of_gradients):
    """Bytes of one all-reduce: a triangle per group, and the numbers that are needed of the gradients."""
    extra = {"nothing": lambda heads: 0, "norms": lambda heads: heads + 1, "products": triangle}[of_gradients]
    return 8 * sum(weight.parts * (triangle(weight.heads) + extra(weight.heads)) for weight in weights.values())


def sums(rank, key):
    """Bytes of every all-reduce, for each step."""
    calls = [step.calls for step in sound(rank[key])["steps"]]
    return [[size for name, size in some if name == "allreduce_"] for some in calls]


@ON_CPU
def test_one_all_reduce_for_all_columns_and_one_for_rows(quick):
    """Groups with different numbers of heads share the call, which also sums the numbers of the gradients."""
    assert bytes_summed({"a": Weight(1, 1)}, "norms") == 8 * (15 + 5)  # by hand: 10 + 4 + 1, and 4 + 1
    rows = {"uneven rows": WEIGHTS["few and rows"]["uneven rows"]}
    needed = {"spos": ("products", "nothing"), "sphere auto": ("norms", "norms")}
    for rank in quick:
        for rule, (measured, not_measured) in needed.items():
            expected = [
                [bytes_summed(some, kind) for some in (WEIGHTS["few"], rows)] for kind in (measured, not_measured)
            ]
            assert sums(rank, ("rule", rule)) == [expected[0], expected[0], expected[1]]


@ON_CPU
@pytest.mark.slow
def test_columns_send_nothing_else(slow):
    expected = [("allreduce_", bytes_summed(WEIGHTS["columns"], "products"))]
    for rank in slow:
        _, *steps_after_lookup = sound(rank["columns"])["steps"]
        assert all(step.calls == expected for step in steps_after_lookup)


@ON_CPU
@pytest.mark.slow
def test_a_rule_without_interaction_sums_nothing(slow):
    """Unless it is measured."""
    for rank in slow:
        *measured, last = sums(rank, ("rule", "sgld"))
        assert all(measured) and last == []


def padded_share(weight):
    """Elements that one of two ranks sends: torch pads the dimensions that it splits to a multiple of two."""
    others = [size for dim, size in enumerate(weight.shape) if dim != weight.shard]
    rows, columns = weight.shape[weight.shard], max(others)
    return -(-rows // 2) * 2 * -(-columns // 2) * math.prod(others) // columns


@ON_CPU
@pytest.mark.slow
def test_rows_are_moved_around_one_all_reduce(slow):
    """Weights and gradients of one shape in one call, and gradients back; on a CPU torch gathers instead."""
    rows = WEIGHTS["rows"]
    shares = [4 * padded_share(weight) for weight in rows.values()]
    for rank in slow:
        sent = [size for _, size in sound(rank["rows"])["steps"][-1].calls]
        assert sent == [*(2 * share for share in shares), bytes_summed(rows, "products"), *shares]


@ON_CPU
@pytest.mark.slow
def test_gradients_of_rows_stay_where_they_are_if_a_rule_does_not_mix_them(slow):
    """Weights are moved, and the force back: two shares instead of three."""
    rows = WEIGHTS["rows"]
    shares = [4 * padded_share(weight) for weight in rows.values()]
    check(slow, "unmixed rows", "rows", "sphere auto")
    for rank in slow:
        sent = [size for _, size in rank["unmixed rows"]["steps"][-1].calls]
        assert sent == [*shares, bytes_summed(rows, "norms"), *shares]


@ON_CPU
@pytest.mark.slow
def test_rows_in_small_batches(slow):
    check(slow, "batches", "rows", "svgd")
    assert all(len(some) > 1 for rank in slow for some in sums(rank, "batches"))


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
    expected = steps(Model({"even": WEIGHTS["columns"]["even"]}), RULES["svgd"], "eager", count=1)
    assert all(largest_error(rank["strides"]["steps"], expected) < 3e-6 for rank in quick)


@ON_CPU
@pytest.mark.slow
def test_a_weight_may_get_another_placement(slow):
    expected = steps(Model({"even": WEIGHTS["columns"]["even"]}), RULES["svgd"], "eager", count=2)
    assert all(largest_error(sound(rank["placement"]), expected) < 3e-6 for rank in slow)


@ON_CPU
@pytest.mark.slow
def test_half_precision(slow):
    expected = steps(Model(WEIGHTS["few"], dtype=torch.bfloat16), RULES["svgd"], "eager")
    expected = [replace(step, gradients={n: g.double() for n, g in step.gradients.items()}) for step in expected]
    assert all(largest_error(sound(rank["half"])["steps"], expected) < 2**-7 for rank in slow)


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


@pytest.fixture
def mesh():
    """A mesh of one GPU over NCCL."""
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "released"])
def test_on_a_gpu(rule, mesh):
    """All layouts: launches, captured graphs and replays around an all-reduce; with one rank, sums have one term."""
    weights = WEIGHTS["everything"]
    expected = steps(Model(weights, device="cuda"), RULES[rule], "eager", count=5)
    model = Model(weights, mesh, torch.float32, "cuda")
    update = Update(model.groups, seed=7)
    found = steps(model, RULES[rule], "triton", count=5, update=update)
    assert len(update._sharded.groups) == len(model.groups)
    in_place = update._sharded._batches[0]
    captured = [local._graphs._graphs for reduction in in_place._reductions for local in reduction.updates]
    assert all(captured) == (rule != "ladder"), "a built-in form is captured, a custom rule is not"
    assert largest_error(found, expected) < 3e-6
    check_measured(found, expected)


@pytest.mark.gpu
def test_columns_need_no_host_synchronisation(mesh, monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    model = Model(WEIGHTS["columns"], mesh, torch.float32, "cuda")
    update, rates = Update(model.groups, seed=0), {id(p): 0.05 for p in model.parameters()}
    for rule in ("sphere auto", "spos"):
        for step in range(3):  # the first calls compile and capture
            model.set_gradients(step)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
            try:
                update.run(StepInputs(RULES[rule], step, rates))
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [True, False])
def test_fsdp2_on_a_gpu(columns, mesh, monkeypatch):
    """`fully_shard` and `repel` on one GPU against unsharded training in float64."""
    case = sharded_cases.Case(columns=columns, rule="auto")
    model, x, y = sharded_cases.make(case)
    optimizer = sharded_cases.optimizer_of(case, model)
    sharded_cases.attach(case, model, optimizer)
    sharded_cases.train(case, model, optimizer, x, y, steps=5)
    expected = sharded_cases.whole(model)
    model, x, y = sharded_cases.make(case, torch.float32)
    model.to("cuda")
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    sharded_cases.shard(model, mesh, columns)
    optimizer = sharded_cases.optimizer_of(case, model)
    handle = sharded_cases.attach(case, model, optimizer)
    sharded_cases.train(case, model, optimizer, x.cuda(), y.cuda(), steps=5)
    assert handle._updates.current._sharded is not None and handle._updates.current._eager_rest is None
    found = {name: value.cpu().double() for name, value in sharded_cases.whole(model).items()}
    assert all(float((found[name] - weight).norm() / weight.norm()) < 1e-5 for name, weight in expected.items())

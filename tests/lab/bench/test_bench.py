"""The benchmark at toy size. No speed is asserted."""

import json
from functools import partial

import pytest
import torch

from repulsive import SVGD, find_heads
from repulsive.lab.bench import growth, report, steps, update
from repulsive.lab.bench.clock import compare, interleaved
from repulsive.lab.systems.translation.model import TransformerConfig


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(steps, "VOCABULARY", 50)
    small = lambda words, **more: TransformerConfig.tiny(words, width=32, feed_forward=32, layers=(1, 1))  # noqa: E731
    monkeypatch.setattr(TransformerConfig, "small", small)
    monkeypatch.setattr(update, "copy_rate", lambda device: 1e10)
    whole = growth.measure_growth
    monkeypatch.setattr(report, "measure_growth", lambda device: whole(device, quick=True))


def test_interleaved_ratios_are_right():
    found = interleaved({"base": lambda: 2.0, "twice": lambda: 4.0}, {"base": 5, "twice": 5}, baseline="base")
    assert found["twice"].ratio == found["twice"].low == found["twice"].high == found["twice"].quick == 2.0
    assert found["base"].seconds == 2.0


def test_rounds_are_paired_and_shuffled():
    """The host slows down with every step, and one variant takes one unit more: drift cancels within a round."""
    clock, order = [100.0], []

    def step(name, more):
        def timed():
            order.append(name)
            clock[0] += 0.01
            return clock[0] + more

        return timed

    rounds = {"base": 60, "more": 60, "slow": 6}
    found = interleaved(
        {"base": step("base", 0.0), "more": step("more", 1.0), "slow": step("slow", 50.0)}, rounds, baseline="base"
    )
    assert {name: row.rounds for name, row in found.items()} == rounds
    assert found["more"].ratio == pytest.approx(1 + 1 / found["base"].seconds, abs=2e-4)
    assert found["more"].low <= found["more"].ratio <= found["more"].high
    counted = [name for name in order if name != "slow"]
    assert {tuple(counted[i : i + 2]) for i in range(0, len(counted), 2)} == {("base", "more"), ("more", "base")}


def test_the_fastest_tenths_are_robust_against_a_busy_host():
    """Two of three steps are delayed by up to a second; the fastest tenths still show the difference."""
    source = torch.Generator().manual_seed(0)
    noise = torch.rand(2, 400, generator=source).where(torch.rand(2, 400, generator=source) < 0.67, 0.0)
    pairs = [(1.005 + float(a), 1.0 + float(b)) for a, b in noise.T]
    found = compare(pairs)
    assert found.quick == pytest.approx(1.005) and found.quick_high - found.quick_low < 1e-6
    assert found.low <= 1.005 <= found.high and found.high - found.low > 0.01


@pytest.mark.slow
def test_the_whole_benchmark(toy, tmp_path):
    options = steps.Options(tokens=(64, 128), rounds=2)
    facts = report.run(options, progress=lambda line: None)
    for rows in facts["steps"].values():
        assert set(rows) == set(steps.VARIANTS)
        assert all(row["seconds"] > 0 and row["rounds"] == 2 for row in rows.values())
        assert rows["all layers"]["host_seconds"] > 0
    assert facts["update"]["groups"] == 9
    made = report.write(facts, tmp_path)
    assert json.loads((tmp_path / "bench-cpu.json").read_text())["steps"].keys() == {"64", "128"}
    text = (tmp_path / "bench-cpu.md").read_text()
    assert all(f"| {name} |" in text for name in steps.VARIANTS) and "Inside a step of 128 tokens" in text
    assert (tmp_path / "bench-cpu.svg").read_text().startswith("<?xml") and len(made) == 3


@pytest.mark.slow
def test_every_finished_part_is_kept(toy, tmp_path, monkeypatch):
    """An interrupted benchmark keeps its finished parts."""
    whole = steps.Workload.warm_up

    def killed(self, variant, tokens):
        if variant == "Frobenius":
            raise KeyboardInterrupt
        whole(self, variant, tokens)

    monkeypatch.setattr(steps.Workload, "warm_up", killed)
    with pytest.raises(KeyboardInterrupt):
        report.run(steps.Options(tokens=(64,), rounds=1), out=tmp_path, progress=lambda line: None)
    kept = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert set(kept["steps"]["64"]) == set(steps.VARIANTS) - {"Frobenius"}
    assert "growth" in kept and "| all layers |" in (tmp_path / "bench-cpu.md").read_text()


@pytest.mark.slow
def test_one_compilation_serves_every_size(toy, monkeypatch):
    """Batches of two sizes share one compiled graph, which computes the loss."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    work = steps.Workload(steps.Options(tokens=(64, 128), compiled=True))
    work.model.eval()
    found = [work.loss("all layers")(work.batches[tokens]) for tokens in (64, 128)]
    assert len(graphs) == 1
    for loss, tokens in zip(found, (64, 128), strict=True):
        torch.testing.assert_close(loss, work._compute(None, work.batches[tokens]))


def test_variants_do_what_their_names_say(toy):
    """Plain keeps gradients, one projection at a time equals the library, and a regularizer changes the loss."""
    work = steps.Workload(steps.Options(tokens=(64,)))
    work.model.eval()
    batch = work.batches[64]
    assert work.loss("disagreement")(batch) > work.loss("MA")(batch)
    assert work.loss("Frobenius")(batch) > work.loss("MA")(batch)
    groups = find_heads(work.model)
    ends = []
    for variant in ("MA", "all layers", "one projection at a time"):
        work.optimizer.zero_grad()
        work.loss(variant)(batch).backward()
        before = groups[0].slices[0].parameter().grad.clone()
        with work.attached(variant):
            for hook in work.optimizer._optimizer_step_pre_hooks.values():
                hook(work.optimizer, (work.optimizer,), {})
        ends.append((before, groups[0].slices[0].parameter().grad.clone()))
    assert torch.equal(*ends[0])
    expected = SVGD().gradient(groups[0].read(), groups[0].slices[0].take(ends[1][0])).view_as(ends[1][1])
    assert torch.allclose(ends[1][1], expected, rtol=1e-4, atol=1e-9)
    assert torch.allclose(ends[2][1], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_the_command(toy, capsys, tmp_path):
    from repulsive.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "cpu", "--tokens", "64", "--rounds", "1", "--no-growth", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "all layers" in capsys.readouterr().out
    for wrong in (["--device", "tpu"], ["--variant", "some layers"], ["--tokens", "1"], ["--rounds", "-1"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *wrong])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_command_prints_a_table_or_one_json_document(toy, capsys, tmp_path):
    from repulsive.cli.app import run as run_command

    words = ["bench", "--device", "cpu", "--tokens", "64", "--rounds", "1", "--no-growth", "--variant", "all layers"]
    assert run_command(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step time / plain step\nvariant") and "|" not in shown and "update alone: " in shown
    assert run_command([*words, "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"machine", "threads", "torch", "repulsive", "date", "options", "update", "steps"}
    assert run_command([*words, "--json", str(tmp_path / "bench.json")]) == 0
    assert set(json.loads((tmp_path / "bench.json").read_text())) == set(facts)

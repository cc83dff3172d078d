"""The benchmark measures what it says, at toy size; nothing here asserts a speed."""

import json

import pytest
import torch

from repulsive import SVGD, find_heads
from repulsive.bench import growth, report, steps
from repulsive.bench.clock import interleaved
from repulsive.models.transformer import TransformerConfig


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(steps, "VOCABULARY", 50)
    small = lambda words, **more: TransformerConfig.tiny(words, width=32, feed_forward=32, layers=(1, 1))  # noqa: E731
    monkeypatch.setattr(TransformerConfig, "small", small)
    monkeypatch.setattr(steps, "copy_rate", lambda device: 1e10)
    whole = growth.measure_growth
    monkeypatch.setattr(report, "measure_growth", lambda device: whole(device, quick=True))


def test_interleaved_ratios_are_right():
    found = interleaved({"base": lambda: 2.0, "twice": lambda: 4.0}, 5, baseline="base")
    assert found["twice"].ratio == found["twice"].low == found["twice"].high == 2.0
    assert found["base"].seconds == 2.0


def test_the_whole_benchmark(toy, tmp_path):
    options = steps.Options(tokens=(64,), rounds=2)
    facts = report.run(options, progress=lambda line: None)
    assert list(facts["steps"]["64"]) == list(steps.VARIANTS)
    assert all(row["seconds"] > 0 for row in facts["steps"]["64"].values())
    assert facts["update"]["groups"] == 9
    made = report.write(facts, tmp_path)
    assert json.loads((tmp_path / "bench-cpu.json").read_text())["steps"].keys() == {"64"}
    text = (tmp_path / "bench-cpu.md").read_text()
    assert all(name in text for name in steps.VARIANTS)
    assert (tmp_path / "bench-cpu.svg").read_text().startswith("<?xml") and len(made) == 3


def test_variants_do_what_their_names_say(toy):
    """Plain leaves gradients alone; one at a time equals the library; a penalty changes the loss."""
    work = steps.Workload(steps.Options(tokens=(64,)), 64)
    work.model.eval()
    assert work._loss("disagreement")() > work._loss("MA")()
    assert work._loss("Frobenius")() > work._loss("MA")()
    groups = find_heads(work.model)
    ends = []
    for variant in ("MA", "all layers", "one projection at a time"):
        work.optimizer.zero_grad()
        work._loss(variant)().backward()
        before = groups[0].slices[0].parameter().grad.clone()
        with work._attached(variant):
            for hook in work.optimizer._optimizer_step_pre_hooks.values():
                hook(work.optimizer, (work.optimizer,), {})
        ends.append((before, groups[0].slices[0].parameter().grad.clone()))
    assert torch.equal(*ends[0])
    expected = SVGD().gradient(groups[0].read(), groups[0].slices[0].take(ends[1][0])).view_as(ends[1][1])
    assert torch.allclose(ends[1][1], expected, rtol=1e-4, atol=1e-9)
    assert torch.allclose(ends[2][1], expected, rtol=1e-4, atol=1e-9)


def test_the_command(toy, capsys, tmp_path):
    from repulsive.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "cpu", "--tokens", "64", "--rounds", "1", "--no-growth", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "all layers" in capsys.readouterr().out
    for wrong in (["--device", "tpu"], ["--variant", "some layers"], ["--tokens", "1"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *wrong])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1

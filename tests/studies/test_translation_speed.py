"""The speed benchmark of translation at toy size: every part is measured and saved. No speed is asserted."""

import importlib
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.lab.systems.translation.task import Model
from tests.lab.systems.translation import digits
from tests.scripts import study

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
pytest.importorskip("sacremoses")
pytest.importorskip("sacrebleu")

TOY = ("training.precision=fp32", "model.width=32", "model.depth=[1,2]", "model.feed_forward=48")
PARTS = ("train", "decode", "generate", "marian")


@pytest.fixture(scope="module")
def speed():
    with study("studies.speed.translation") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits.make_data(tmp_path_factory.mktemp("digits"), size=200)


def measure(speed, data, out, *more):
    sizes = ("--tokens", "512", "--sentences", "20", "--length", "9", "--beam", "3", "--batches", "8", "16")
    quick = ("--measure", "0.1", "--warm-up", "1", "--steps", "4", "--device", "cpu")
    speed.main(["--data", str(data / "prepared"), "--out", str(out), *sizes, *quick, *more, "--set", *TOY])
    return json.loads((out / "speed.json").read_text()), (out / "speed.md").read_text()


@pytest.fixture(scope="module")
def measured(speed, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("speed")
    return out, *measure(speed, data, out)


def test_every_part_is_measured(measured):
    _, facts, text = measured
    rows = {name: facts["train"][f"512 {name}"] for name in ("MA", "SVGD")}
    rows |= {name: facts["marian"][f"512 {name}"] for name in ("Seq2SeqTrainer", "bare loop")}
    for name, row in rows.items():
        assert row["tokens_per_second"] > 0 and f", {name} | {row['tokens_per_second']:,.0f} |" in text
    assert len({row["parameters"] for row in rows.values()}) == 1, "Marian is another model"
    assert rows["MA"]["step_operations"] == rows["SVGD"]["step_operations"]
    assert facts["train"]["512 ratio"]["ratio"] > 0 and "SVGD over MA, 512 tokens" in text
    for part in ("decode", "generate"):
        found = facts[part]["all"]
        assert found["words"] == 9 and found["sentences"] == 20 and found["batch"] in (8, 16)
        assert found["words_per_second"] == pytest.approx(9 * 20 / found["seconds"])
    assert not any("notes" in facts[part] for part in PARTS)
    assert f"{', '.join(('train', 'marian', 'decode', 'generate'))}: `python -m studies.speed.translation" in text


def test_a_part_measured_again_joins_the_others(speed, data, measured):
    """A part without time left does not stop the others; other settings start a new file."""
    out, before, _ = measured
    after, text = measure(speed, data, out, "--only", "decode", "train", "--limit", "0")
    assert after["generate"] == before["generate"] and after["marian"] == before["marian"]
    assert (
        "stopped: the limit of 0 s was reached at warming up MA, 512 tokens" in text and "512 MA" not in after["train"]
    )
    assert "stopped: the limit of 0 s was reached at batches of 8" in text and "all" not in after["decode"]
    after, _ = measure(speed, data, out, "--only", "decode", "--beam", "2")
    assert "marian" not in after and after["decode"]["all"]["beam"] == 2


def test_a_part_that_fails_is_reported(speed, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "UNLIKELY", 30.0)  # everything ends at once
    with pytest.raises(SystemExit, match="decode, generate failed"):
        measure(speed, data, tmp_path, "--only", "decode", "generate")
    assert (
        "expected translations of 9 words" in (tmp_path / "speed.md").read_text()
        and "Traceback" in capsys.readouterr().err
    )


def test_the_timed_loop_trains_as_the_loop_does(speed, data, tmp_path, monkeypatch):
    made = digits.loop(data, tmp_path / "run", "training.average=0", "training.epochs=2")
    monkeypatch.setattr(made, "_final_evaluation", lambda: ({}, {}, {}))  # it would go back to the best weights
    monkeypatch.setattr(made, "_finish", lambda *found: {})
    made.run()
    made.folder.close()
    timed = speed.TimedLoop(speed.open_task(str(digits.toml(data)), data / "prepared", ()), "cpu")
    for _ in range(2):
        timed.one_epoch()
    assert timed.step == made.step == 2 * timed.steps
    for name, value in made.bare.state_dict().items():
        assert torch.equal(value, timed.bare.state_dict()[name])


@pytest.mark.parametrize(("source", "target"), [(7, 5), (3, 11)])
def test_operations_are_those_that_torch_counts(speed, source, target):
    """Of a forward pass; torch counts what the causal mask hides, too."""
    sizes = Model(width=32, heads=4, depth=(2, 3), feed_forward=48)
    model = Transformer(TransformerConfig(50, 32, 4, (2, 3), 48)).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.ones(1, source, dtype=torch.long), torch.ones(1, target, dtype=torch.long))
    hidden = 3 * target * (target - 1) // 2 * 2 * 32  # multiplications, in scores and in sums of values
    operations = importlib.import_module("studies.speed.timed_loop").operations
    found = operations(sizes, 50, torch.tensor([source]), torch.tensor([target]))
    assert found == 3 * (counter.get_total_flops() - 2 * hidden)
    assert operations(sizes, 50, torch.tensor([source] * 4), torch.tensor([target] * 4)) == 4 * found

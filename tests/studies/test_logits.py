"""The study of logits: models of one wave do not see each other, and it compares heads as the library does."""

import json
from pathlib import Path

import pytest
import torch

from repulsive.particles.logits import Circuits, centre_keys, cosines
from tests.scripts import study as studies
from tests.threads import one_thread  # noqa: F401  an autouse fixture


@pytest.fixture
def study():
    with studies("studies.logits.ensemble") as ensemble, studies("studies.logits.arms") as arms:
        yield ensemble, arms


def wave(study, runs, steps=4):
    ensemble, _ = study
    size = ensemble.Size(2, 2, 16, batch=4, length=16, steps=steps, sequences=4, positions=8, warmup=2)
    made = ensemble.Wave(size, [ensemble.Run(*run) for run in runs], torch.device("cpu"), compile=False)
    for step in range(steps):
        tokens = torch.randint(0, 256, (1, 4, 17), generator=torch.Generator().manual_seed(step))
        made.step(step, tokens.expand(len(runs), -1, -1))
    return made


def test_models_of_a_wave_are_those_trained_alone(study):
    _, arms = study
    runs = [(arms.PLAIN, 1e-2, 0), (arms.REPEL, 1e-2, 0), (arms.Arm("attract", qk=-0.3, norm=True), 3e-3, 1)]
    together = wave(study, runs)
    for e, run in enumerate(runs):
        alone = wave(study, [run])
        for name, value in alone.params.items():
            torch.testing.assert_close(together.params[name][e], value[0], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(together.params["wq"][0], together.params["wq"][1], atol=1e-4)


def test_cosines_are_those_of_the_library(study):
    made = wave(study, [(study[1].REPEL, 1e-2, 0)], steps=1)
    tokens = torch.randn(1, 2, 4, 8, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        within = made.cosines(made.params["wq"], made.params["wk"], tokens)[1][0, 1]
        x = tokens[0, 1]  # [S, n, D]
        q, k = ((x @ made.params[name][0, 1]).unflatten(-1, (2, 8)) for name in ("wq", "wk"))
        expected = cosines(Circuits(q.flatten(0, 1), centre_keys(k).flatten(0, 1)).products())
    torch.testing.assert_close(within, expected, rtol=1e-4, atol=1e-5)


def test_every_named_arm_is_found(study):
    _, arms = study
    for arm in (arm for each in arms.SETS.values() for arm in each):
        assert arms.named(arm.name)[0].name == arm.name


def test_the_table_of_images_agrees_with_the_results():
    folder = Path("results/logits")
    with studies("studies.logits.images") as images:
        table = images.table(json.loads((folder / "images.json").read_text()))
    assert table in (folder / "images.md").read_text()


def test_curves_end_with_the_training_and_compare_equal_steps():
    """A run beside a longer one has entries after its end; seeds may have logged other steps."""
    size = {"steps": 20}
    short = {"size": size, "log": {"step": [0, 10, 19], "loss": [3.0, 2.0, 1.0], "mean": [[0.1], [0.2], [0.3]]}}
    beside = {"size": size, "log": {"step": [0, 5, 10, 19, 20], "loss": [4.0] * 5, "mean": [[0.3]] * 5}}
    with studies("studies.logits.tables") as tables:
        assert tables._excess(beside, short) == {0: 1.0, 10: 2.0, 19: 3.0}
        steps, means = tables._mean_curve([tables._similarity(short), tables._similarity(beside)])
    assert steps == [0, 10, 19] and means == pytest.approx([0.2, 0.25, 0.3])

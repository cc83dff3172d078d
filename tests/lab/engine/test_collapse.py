"""A collapsed model gives the same output for every input: detected from the log, reported once, shown in tables."""

import math
import warnings

import pytest
import torch

from repulsive.errors import DivergedError
from repulsive.lab.engine.result_tables import terminal_tables
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stop_signals import Stopped
from repulsive.lab.engine.tables import as_markdown, as_plain, rows
from repulsive.lab.runs.listing import describe_runs
from repulsive.lab.runs.results import notes
from repulsive.lab.runs.score import score
from repulsive.repulsion.model_collapse import CollapseDetector
from tests.lab.engine import tiny

DIES = 8  # the step after which heads get no gradient


def first(*seen):
    """The step of a collapse in a list of (loss, drive) pairs; drives differ a little, as measurements do."""
    watch = CollapseDetector()
    told = [watch.observe(step, loss, drive * (1 - 1e-9 * step)) for step, (loss, drive) in enumerate(seen)]
    assert [n for n, words in enumerate(told) if words] == ([] if watch.step is None else [watch.step + 4])
    return watch.step


FALLING = [(8.0, 4e-2), (6.0, 2e-2), (4.0, 1e-2)]


def test_gradients_gone_and_the_loss_above_where_it_was():
    assert first(*FALLING, *[(5.0, 3e-6)] * 5) == 3
    assert first(*FALLING, *[(5.0, 0.0)] * 4) is None  # may be the batches
    assert first(*FALLING, *[(5.0, 0.0)] * 4, (5.0, 1e-2), *[(5.0, 0.0)] * 5) == 8
    assert first(*FALLING, *[(5.0, 0.0)] * 4, (3.9, 0.0), *[(5.0, 0.0)] * 5) == 8
    assert first(*FALLING, *[(5.0, 0.0)] * 5, (5.0, 1e-2), *[(9.0, 1e-9)] * 9) == 3  # told once


@pytest.mark.parametrize(
    "last",
    [(3.9, 1e-9), (4.0, 0.0), (4.07, 1e-9), (5.0, 5e-6), (40.0, 1e-2), (math.nan, 0.0), (5.0, math.nan)],
    ids=["by heart", "still", "jitter", "small gradients", "a bad batch", "no loss", "not measured"],
)  # 4.08 is 2 % of 8 - 4 above 4, 4e-6 a ten thousandth of 4e-2
def test_no_collapse(last):
    assert first(*FALLING, *[last] * 9) is None
    assert first(*[last] * 9) is None


def test_an_old_measurement_says_nothing():
    watch = CollapseDetector()
    for step, (loss, drive) in enumerate([*FALLING, *[(5.0, 1e-9)] * 9]):
        watch.observe(step, loss, drive)
    assert watch.step is None


def test_heads_that_never_had_gradients():
    assert first((8.0, 0.0), (4.0, 0.0), *[(9.0, 0.0)] * 9) is None


def test_losses_below_zero():
    assert first((-1.0, 1e-2), (-5.0, 1e-2), *[(-4.95, 1e-9)] * 9) is None
    assert first((-1.0, 1e-2), (-5.0, 1e-2), *[(-4.0, 1e-9)] * 5) == 2


def test_other_log_lines_are_ignored():
    watch = CollapseDetector()
    lines = [{"kind": "train", "step": n, "loss": loss} for n, (loss, _) in enumerate(FALLING)]
    lines += [{"kind": "heads", "step": 2, "drive": 1e-2}, {"kind": "dev", "step": 2, "loss": 99.0}]
    for wrong in ((3, 9.0, 2, 1e-9), (4, "much", 4, 1e-9), (5, 9.0, 5, 10**400), (5, None, 5, None)):  # 2: another's
        step, loss, other, drive = wrong
        lines += 5 * [{"kind": "train", "step": step, "loss": loss}, {"kind": "heads", "step": other, "drive": drive}]
    watch.read_log(lines)
    assert watch.step is None
    for step in range(6, 11):
        watch.read_log([{"kind": "train", "step": step, "loss": 9}, {"kind": "heads", "step": step, "drive": 0}])
    assert watch.step == 6


def dying(data, folder, *more, dies=DIES):
    """A training whose heads get no gradient after a step, and whose loss returns to its first value."""
    spec = tiny.Spec(tiny.recipe(data, "training.log_every=1", "training.save_every=1", *more), folder, "cpu")
    made = tiny.loop(spec)

    def after():
        if made.step >= dies:
            made.meter.add(torch.tensor(9.0))
            for parameter in made.bare.parameters():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)

    tiny.after_gradients(made, after)
    return made


def messages(made):
    with warnings.catch_warnings(record=True, action="always") as seen:
        made.run()
    made.folder.close()
    return [str(each.message) for each in seen if "collapsed" in str(each.message)]


@pytest.fixture(scope="module")
def dead(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dead") / "seed-0"
    return folder, messages(dying(data, folder))


def test_a_training_says_so_once(dead):
    folder, told = dead
    (words,) = told
    assert words.startswith("step 9: the model has collapsed. The gradient norm of its heads is 0.0e+00, down from ")
    assert "learning rate" in words and RunFolder(folder).collapsed == 9


def test_a_training_that_goes_well_says_nothing(whole, data, tmp_path):
    assert messages(dying(data, tmp_path / "run", dies=tiny.STEPS)) == []
    assert RunFolder(whole).collapsed is None


def test_a_collapse_may_end_the_training(data, tmp_path):
    """As with a loss that is not finite: there is no result, and a file in the folder says why."""
    made = dying(data, tmp_path / "run", "training.stop_collapsed=true")
    with pytest.raises(DivergedError, match=r"^step 9: the model has collapsed"):
        made.run()
    made.folder.close()
    run = RunFolder(tmp_path / "run")
    assert made.step == 13 and run.diverged and run.result is None and run.collapsed == 9
    assert (run.path / "diverged.txt").read_text().startswith("step 9: the model has collapsed")
    assert describe_runs(tmp_path)[0].rows == [[str(run.path), "diverged", "see diverged.txt"]]


@pytest.mark.parametrize(("stop", "again"), [(7, 1), (11, 1), (15, 0)])
def test_a_resumed_training_knows_earlier_measurements(stop, again, dead, data, tmp_path):
    """Stopped before five bad measurements, the resumed part reports it; stopped later, only the first part does."""
    made = dying(data, tmp_path / "run")
    made.watcher = tiny.At(stop, lambda: setattr(made._request, "number", 15))
    with warnings.catch_warnings(record=True, action="always") as before, pytest.raises(Stopped):
        made.run()
    made.folder.close()
    assert sum("collapsed" in str(each.message) for each in before) == 1 - again
    assert len(messages(dying(data, tmp_path / "run"))) == again
    tiny.assert_same(tmp_path / "run", dead[0])


def test_tables_say_so(dead, whole):
    found = rows([whole, dead[0].parent])
    assert [row.collapsed for row in found] == [{}, {0: 9}]
    label = found[1].label
    assert label == f"tiny ({dead[0].parent.name})"  # both rows have the same recipe
    assert f"- **{label}, seed 0: collapsed at step 9**" in as_markdown(found)
    assert as_plain(found[1])["collapsed"] == {0: 9}
    assert notes(found)[0] == f"{label}, seed 0: collapsed at step 9."
    assert "collapsed" not in as_markdown(found[:1])
    assert [row.collapsed for row in score([whole, dead[0]], "dev", device="cpu")] == [{}, {0: 9}]
    assert describe_runs(dead[0].parent)[0].rows[0][2].endswith(", collapsed at step 9")
    assert terminal_tables(found)[-1] == f"warning: {label}, seed 0: collapsed at step 9"

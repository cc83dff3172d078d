"""A loss that is not finite: the error names step, items and remedy, and no bad weights are saved."""

import json
import math
import re

import pytest
import torch

from repulsive.errors import DivergedError
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.loss_meter import Meter
from repulsive.lab.engine.task import Evaluation
from tests.lab.engine import tiny

BAD = 7  # step


def poisoned(data, folder, *more, bad=BAD, value=math.nan):
    """A loop whose loss is `value` from one step on."""
    made = tiny.loop(tiny.Spec(tiny.recipe(data, *more), folder, "cpu"))
    loss = made.task.loss

    def poison(model, inputs, length):
        return loss(model, inputs, length) * (value if made.step + 1 >= bad else 1.0)

    made.task.loss = poison
    return made


def fails(made):
    with pytest.raises(DivergedError) as found:
        made.run()
    made.folder.close()
    return str(found.value)


def all_finite(folder):
    state = Checkpoints(folder / "checkpoints").latest()[1]
    best = state["best"] or {"weights": {}}
    return all(bool(x.isfinite().all()) for x in [*state["model"].values(), *best["weights"].values()])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_step_its_items_and_advice(value, data, tmp_path):
    made = poisoned(data, tmp_path, "training.save_every=1", value=value)
    message = fails(made)
    assert made.step == BAD  # at once, although it logs every 50 steps
    ids = made.task.order(0)[BAD - 1].indices.tolist()
    assert re.match(rf"step {BAD}: the loss is not a finite number; items {ids[0]}, {ids[1]}, ", message)
    assert f"and {len(ids) - 8} more" in message and "Lower optimizer.lr" in message
    assert Checkpoints(tmp_path / "checkpoints").latest()[0] == BAD - 1 and all_finite(tmp_path)
    assert not (tmp_path / "best").exists() and not (tmp_path / "result.json").exists()


def on_a_gpu(made):
    """Make a loop check losses as on a GPU: only when it logs, saves or evaluates, to avoid synchronising."""
    made._check_every_step = False
    return made


@pytest.mark.parametrize(
    ("more", "noticed"),
    [
        (["training.log_every=50"], 10),  # the epoch ends at step 10, and its loss is logged
        (["training.log_every=4"], 8),
        (["training.save_every=9", "training.log_every=50"], 9),
        (["training.evaluate_every=8", "training.log_every=50"], 8),
    ],
)
def test_noticed_late_the_first_bad_step_is_named(more, noticed, data, tmp_path):
    made = on_a_gpu(poisoned(data, tmp_path, *more))
    message = fails(made)
    assert made.step == noticed
    ids = made.task.order(0)[BAD - 1].indices.tolist()
    assert message.startswith(f"step {BAD}: the loss is not a finite number; items {ids[0]}, {ids[1]}, ")
    assert not list((tmp_path / "checkpoints").glob("*")) and made.best is None


def test_noticed_in_the_second_epoch_after_a_resume(data, tmp_path):
    """The meter resumes its count, and the error names a batch of the second epoch."""
    more = ("training.save_every=12", "training.log_every=50")
    made = poisoned(data, tmp_path, *more, bad=14)
    fails(made)
    made = on_a_gpu(poisoned(data, tmp_path, *more, bad=14))
    message = fails(made)
    ids = made.task.order(1)[3].indices.tolist()
    assert message.startswith(f"step 14: the loss is not a finite number; items {ids[0]}, {ids[1]}, ")
    assert made.step == 20


@pytest.mark.parametrize("at", [4, 20])
def test_weights_that_are_not_finite_are_never_kept(at, data, tmp_path):
    """A finite loss with gradients that are not finite: they must be found before the checkpoint is saved."""
    made = tiny.loop(tiny.Spec(tiny.recipe(data, "training.save_every=1"), tmp_path, "cpu"))

    def overflow():
        if made.step + 1 == at:
            next(made.bare.parameters()).grad.fill_(math.inf)

    tiny.after_gradients(made, overflow)
    assert fails(made).startswith(f"step {at}: its update made weights that are not finite numbers; items ")
    assert Checkpoints(tmp_path / "checkpoints").latest()[0] == at - 1 and all_finite(tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_the_same_command_ends_the_same_way(data, tmp_path):
    first = fails(poisoned(data, tmp_path, "training.save_every=2"))
    assert fails(poisoned(data, tmp_path, "training.save_every=2")) == first


def test_meter():
    meter = Meter(torch.device("cpu"))
    assert (meter.count(), meter.first_bad(), meter.mean()) == (0, None, 0.0)
    for loss in (1.0, 2.0, math.nan, 4.0, math.inf):
        meter.add(torch.tensor(loss))
    assert (meter.count(), meter.first_bad()) == (5, 2)
    kept = meter.state.clone()
    place = meter.state.data_ptr()
    meter.reset()
    meter.add(torch.tensor(3.0))
    assert (meter.count(), meter.first_bad(), meter.mean()) == (1, None, 3.0)
    meter.restore(kept)
    assert (meter.count(), meter.first_bad()) == (5, 2)
    assert meter.state.data_ptr() == place  # CUDA graphs write there


def test_meters_of_processes_are_merged():
    """The mean over ranks, and the earliest bad loss; merging twice changes nothing."""

    class Three:
        def gather(self, mine):
            others = torch.tensor([[4.0, 2.0, 1.0], [6.0, 2.0, 0.0]], dtype=torch.float64)
            return torch.cat([mine, others]) if not self.merged else mine.expand(3, -1)

        merged = False

    meter, everyone = Meter(torch.device("cpu")), Three()
    meter.add(torch.tensor(1.0))
    meter.add(torch.tensor(1.0))
    meter.merge(everyone)
    assert (meter.mean(), meter.count(), meter.first_bad()) == (2.0, 2, 0)
    everyone.merged = True
    meter.merge(everyone)
    assert (meter.mean(), meter.count(), meter.first_bad()) == (2.0, 2, 0)


def test_lines_of_the_metrics_are_finite(whole):
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    values = [value for line in lines for value in json.loads(line).values()]
    assert all(math.isfinite(value) for value in values if isinstance(value, float))


@pytest.mark.parametrize(("accuracies", "best"), [((math.nan, 0.2), 20), ((0.2, math.nan), 10)])
def test_weights_with_a_metric_that_is_no_number_are_not_the_best(accuracies, best, data, tmp_path):
    made = tiny.loop(tiny.Spec(tiny.recipe(data), tmp_path, "cpu"))
    validate, values = made.task.validate, iter(accuracies)
    made.task.validate = lambda model: Evaluation(validate(model).metrics | {"accuracy": next(values)})
    assert made.run()["best_step"] == best


@pytest.mark.parametrize("part", ["dev", "test"])
def test_an_infinite_score_stops_the_run(part, data, tmp_path):
    made = tiny.loop(tiny.Spec(tiny.recipe(data), tmp_path, "cpu"))
    name = "validate" if part == "dev" else "evaluate"
    score = getattr(made.task, name)

    def infinite(model, *split):
        evaluation = score(model, *split)
        return (
            Evaluation({**evaluation.metrics, "nll": math.inf}, evaluation.items)
            if split in ((), (part,))
            else evaluation
        )

    setattr(made.task, name, infinite)
    assert re.match(rf"step \d+: the nll of the {part} set is infinite\. Lower optimizer\.lr", fails(made))
    assert (tmp_path / "diverged.txt").exists() and not (tmp_path / "result.json").exists()

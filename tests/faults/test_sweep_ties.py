"""A sweep that was killed chooses what one that was not killed chooses: equal points go by the order of the grid."""

import json
from dataclasses import dataclass

import pytest

from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.sweep import Trial, best, sweep
from repulsive.lab.systems.registry import open_recipe

pytest.importorskip("optuna")
STAGES = [{"method.alpha": ["0.1", "0.2", "0.3"]}, {"seed": ["3", "1", "2"]}]


class Killed(BaseException):
    """Ends a sweep as SIGKILL does: nothing is told to Optuna."""


@dataclass
class Machine:
    """Trains by writing equal results; dies once, at the given run."""

    folder: object
    dies_at: int = -1
    count: int = 0

    def plan(self, changes):
        name = "+".join(changes).replace("/", "-") or "none"
        return [Spec(open_recipe("reviews/svgd", list(changes)), self.folder / name)]

    def train(self, specs):
        for spec in specs:
            if self.count == self.dies_at:
                self.count += 1
                raise Killed
            self.count += 1
            spec.folder.mkdir(parents=True, exist_ok=True)
            (spec.folder / "result.json").write_text(json.dumps({"dev": {"accuracy": 0.5}}))

    def run(self, at_once):
        storage = f"sqlite:///{self.folder}/optuna.db"
        return sweep("name", STAGES, self.plan, self.train, "accuracy", storage, place="here", at_once=at_once)


@pytest.mark.parametrize(("dies_at", "at_once"), [(-1, 2), (0, 1), (4, 2)])
def test_the_same_recipe_is_chosen_however_often_it_was_killed(tmp_path, dies_at, at_once):
    machine = Machine(tmp_path, dies_at)
    if dies_at >= 0:
        with pytest.raises(Killed):
            machine.run(at_once)
    trials = machine.run(at_once)
    first = ["method.alpha=0.1", "method.alpha=0.2", "method.alpha=0.3"]
    expected = [(change,) for change in first] + [(first[0], f"seed={seed}") for seed in (3, 1, 2)]
    assert [trial.changes for trial in trials] == expected
    assert best(trials) == Trial(("method.alpha=0.1", "seed=3"), 0.5, 2)

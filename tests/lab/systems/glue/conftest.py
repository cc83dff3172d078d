"""Prepared tasks of GLUE, and a model fine-tuned on MNLI."""

import pytest

from repulsive.lab.systems.glue.data import TASKS
from tests.lab.systems.glue import toy_glue


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return toy_glue.make_data(tmp_path_factory.mktemp("glue"), *TASKS)


@pytest.fixture(scope="module")
def mnli(data, tmp_path_factory):
    return toy_glue.train(data, "mnli", tmp_path_factory.mktemp("mnli") / "seed-0", "training.epochs=1")

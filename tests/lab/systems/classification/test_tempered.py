"""Recipes that sample at the temperature of the posterior: a few steps with the noise in the optimizer's step."""

import json

import pytest

from repulsive.lab.systems.registry import open_recipe
from tests.lab.engine import tiny

KEYS = ("rule", "stepsize", "alpha", "beta", "noise", "noise_in", "temperature", "order")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.make_data(tmp_path_factory.mktemp("tempered") / "reviews")


@pytest.mark.parametrize("name", ["sgld-tempered", "spos-tempered"])
def test_tempered_recipes_train(name, data, tmp_path):
    method = open_recipe(f"yelp/{name}").method
    assert (method.temperature, method.noise_in) == ("data", "optimizer")
    changes = [f"method.{key}={json.dumps(getattr(method, key))}" for key in KEYS]
    folder = tiny.train(data, tmp_path, "training.epochs=1", *changes)
    assert 0 < folder.result["test"]["nll"] < 3.0  # log 5 = 1.6 at the start

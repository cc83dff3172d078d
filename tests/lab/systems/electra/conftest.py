"""A toy corpus in two packings, and a model pre-trained on it."""

import pytest

from tests.lab.systems.electra import words


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return words.make_data(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def padded(tmp_path_factory):
    return words.make_data(tmp_path_factory.mktemp("padded"), packing="official")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    return words.train(data, tmp_path_factory.mktemp("run") / "seed-0", "training.epochs=1")

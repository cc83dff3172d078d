"""Fixtures for the tests of training: tiny data, an uninterrupted run to compare with, and one thread."""

import pytest
import torch

from tests.lab.engine import tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Use one thread, as the processes started by tests do: the order of a sum changes its last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tiny.make_data(tmp_path_factory.mktemp("tiny") / "prepared")


LOGGED = ("training.save_every=1", "training.log_every=3", "training.keep=3")


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """An uninterrupted run with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny.train(data, folder, *LOGGED)
    return folder

"""One thread for a whole file of tests, where the last bit counts: import `one_thread` there."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in another order differ in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""The study of the control without a kernel, at its smallest."""

import pytest

from tests.scripts import study


@pytest.fixture(scope="module")
def kernel_free():
    with study("studies.kernel_free.run") as module:
        yield module


@pytest.mark.slow
def test_a_few_steps_of_every_arm(kernel_free, monkeypatch):
    monkeypatch.setattr(kernel_free, "LINES", 300)
    monkeypatch.setattr(kernel_free, "DEV_LINES", 40)
    results = {result["arm"]: result for result in kernel_free.compare(32, 0, 4)}
    assert list(results) == list(kernel_free.ARMS)
    distance = {arm: result["distance"] for arm, result in results.items()}
    assert distance["svgd, as published"] == 0 < distance["kernel-free"] < distance["plain"] / 5
    assert results["kernel-free"]["norm"] > results["plain"]["norm"]
    page = kernel_free.describe({"command": "c", "torch": "2", "date": "d", "seconds": 1}, list(results.values()))
    assert "## Width 32: heads of 256 numbers" in page and "| kernel-free |" in page

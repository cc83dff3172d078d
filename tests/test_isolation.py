"""What tests draw and compile does not depend on the tests before them, nor on the speed of the machine."""

import random

import pytest
import torch
from hypothesis import settings

from tests.conftest import seed_generators

numpy = pytest.importorskip("numpy")


def draw() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(numpy.random.rand())


@pytest.fixture(scope="module")
def drawn_for_the_module() -> tuple[float, float, float]:
    return draw()


@pytest.fixture
def drawn_for_a_test(drawn_for_the_module: tuple[float, float, float]) -> tuple[float, float, float]:
    return draw()


@pytest.mark.parametrize("number", range(2))
def test_fixtures_and_tests_draw_from_seeded_generators(number, drawn_for_the_module, drawn_for_a_test):
    """The second test finds the fixture of the module made, and nothing else has changed."""
    found = {"drawn_for_the_module": drawn_for_the_module, "drawn_for_a_test": drawn_for_a_test, "test": draw()}
    for name, numbers in found.items():
        seed_generators(name)
        assert draw() == numbers
    assert len(set(found.values())) == 3


def multiply(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x * factor


@pytest.mark.parametrize("factor", range(2, 2 + 10))
def test_a_function_can_be_compiled_in_any_number_of_tests(factor):
    """In one process torch compiles a function for 8 values of an integer, and refuses others."""
    compiled = torch.compile(multiply, backend="eager", fullgraph=True, dynamic=False)
    assert compiled(torch.ones(()), factor) == factor


def test_hypothesis_draws_the_same_examples_and_has_no_deadline():
    assert settings().derandomize and settings().deadline is None and settings().database is None

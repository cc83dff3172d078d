"""Warnings that name the user's line, and short texts of values and errors in messages."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial

import pytest

from repulsive.errors import ConfigError, check_whole, short_message, short_repr, warn_user


def caller_in(module: str) -> Callable[[Callable[[], None]], None]:
    """Return a function of a module of this name that calls a function."""
    space = {"__name__": module}
    exec("def call(function):\n    return function()\n", space)
    return space["call"]


def line_of(module: str) -> tuple[str, int]:
    """Where a warning points, if a hook gives it that code of a module calls: file, and line within this function."""
    library, hook = caller_in(module), caller_in("repulsive.some.hooks")
    with pytest.warns(UserWarning, match="look here") as caught:
        library(partial(hook, partial(library, partial(hook, partial(warn_user, "look here")))))
    return caught[0].filename, caught[0].lineno - line_of.__code__.co_firstlineno


HERE = (
    __file__,
    inspect.getsource(line_of)
    .splitlines()
    .index('        library(partial(hook, partial(library, partial(hook, partial(warn_user, "look here")))))'),
)


@pytest.mark.parametrize(
    "module",
    [
        "torch.optim.optimizer",
        "contextlib",
        "transformers.trainer",
        "accelerate.optimizer",
        "lightning.pytorch.loops",
        "lightning_fabric.wrappers",
        "pytorch_lightning.core",
        "peft.peft_model",
        "sentence_transformers.trainer",
        "trl.trainer",
    ],
)
def test_a_warning_names_the_line_that_calls_a_library(module):
    assert line_of(module) == HERE


@pytest.mark.parametrize("module", ["torch_models", "my.torch", "__main__"])
def test_code_of_similar_names_is_the_users(module):
    assert line_of(module) == ("<string>", 2 - line_of.__code__.co_firstlineno)


def test_a_warning_is_shown_once_for_each_line(recwarn):
    warnings.simplefilter("default")
    for _ in range(3):
        warn_user("the same")
    warn_user("the same")
    assert len(recwarn) == 2


def test_values_are_shown_in_one_short_line():
    assert short_repr("a" * 58) == repr("a" * 58) and short_repr("a" * 59) == "<str object>"
    assert short_repr([1, 2]) == "[1, 2]" and short_repr({"a": "b" * 99}) == "<dict object>"
    with pytest.raises(ConfigError, match=r"^steps=<list object>: must be a whole number, at least 1$"):
        check_whole("steps", ["x" * 99], error=ConfigError)


def test_messages_are_cut_at_a_word():
    text = short_message(ValueError("word " * 100))
    assert text.endswith("word ...") and len(text) <= 160

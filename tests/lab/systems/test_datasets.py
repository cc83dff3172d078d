"""The registry of datasets: declarations fit the plan functions, load no torch, and show as help."""

import importlib
import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from repulsive.cli.app import run
from repulsive.errors import DataError
from repulsive.lab.systems.datasets import dataset_named, datasets
from repulsive.lab.text.settings import Settings

NAMES = ("yelp", "age", "snli", "tsv", "reviews", "movie-reviews")
NAMES += ("translation", "glue", "pretrain", "graphs", "lm", "lm-toy")
SETTINGS = {field.name: field.default for field in fields(Settings)}
LOADED = """
import sys
import types
package = types.ModuleType("repulsive")  # without the public names, which load torch
package.__path__ = [sys.argv[1]]
sys.modules["repulsive"] = package
from repulsive.lab.systems.datasets import datasets
print(len(datasets()), [name for name in ("torch", "numpy", "typer", "rich") if name in sys.modules])
"""


def test_every_dataset_is_found_by_name():
    assert tuple(datasets()) == NAMES
    assert all(dataset_named(name).name == name for name in NAMES)
    with pytest.raises(DataError, match="dataset 'wmt' is unknown; datasets: yelp, age"):
        dataset_named("wmt")


@pytest.mark.parametrize("name", NAMES)
def test_the_options_are_those_of_the_plan_function(name):
    dataset = dataset_named(name)
    module, _, function = dataset.plan.partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    own = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    takes_settings = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = own | (SETTINGS if takes_settings else {})
    assert [option.name for option in dataset.options] == list(accepted)
    for option in dataset.options:
        if accepted[option.name] is not None and not option.hidden and option.type is not bool:
            assert option.default == (accepted[option.name] or option.default)


def test_declarations_load_no_torch():
    source = inspect.getfile(importlib.import_module("repulsive")).removesuffix("/__init__.py")
    result = subprocess.run([sys.executable, "-c", LOADED, source], capture_output=True, text=True, check=True)
    assert result.stdout == f"{len(NAMES)} []\n"


@pytest.mark.parametrize("name", NAMES)
def test_help_lists_the_options_of_one_dataset(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["prepare", name, "--help"]) == 0
    printed = capsys.readouterr().out
    flags = {option.flag or f"--{option.name.replace('_', '-')}" for option in dataset_named(name).options}
    others = {option.flag or f"--{option.name.replace('_', '-')}" for d in datasets().values() for option in d.options}
    shown = {word for word in printed.split() if word.startswith("--")}
    hidden = {f"--{option.name.replace('_', '-')}" for option in dataset_named(name).options if option.hidden}
    assert shown & others == flags - hidden
    assert {"--out", "--force"} <= shown and ("--data" in shown) == (name not in ("reviews", "lm-toy"))
    assert ("--jobs" in shown) == (name not in ("reviews", "glue", "graphs", "lm", "lm-toy"))


def test_help_lists_the_datasets(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for words in (["prepare"], ["prepare", "--help"]):
        assert run(words) == 0
        printed = capsys.readouterr().out
        assert all(dataset.name in printed and dataset.summary in printed for dataset in datasets().values())


def test_the_dataset_comes_before_its_options(capsys):
    assert run(["prepare", "--data", "raw", "tsv"]) == 2
    assert "expected a dataset before --data; give: repulsive prepare DATASET --data" in capsys.readouterr().err


def test_an_option_that_was_misspelt(capsys):
    assert run(["prepare", "yelp", "--vector", "glove.txt"]) == 2
    printed = capsys.readouterr().err
    assert "dataset 'yelp' has no option '--vector'; did you mean '--vectors'? It has --data, --out" in printed
    assert printed.count("\n") == 1

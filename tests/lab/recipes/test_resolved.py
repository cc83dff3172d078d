"""Every built-in recipe has exactly the values in resolved.json: a change to one is visible, and none is by accident.

After an intended change, rewrite the file and read the diff: `python -m tests.lab.recipes.test_resolved`
"""

import json
from pathlib import Path

import pytest

from repulsive.lab.engine.built_in import names
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.recipe_tables import differences
from repulsive.lab.systems.registry import open_recipe

FILE = Path(__file__).with_name("resolved.json")
RESOLVED = json.loads(FILE.read_text())


def test_no_recipe_is_missing_or_new():
    assert names() == sorted(RESOLVED)


@pytest.mark.parametrize("name", sorted(RESOLVED))
def test_values_are_unchanged(name):
    tables = as_tables(open_recipe(name))
    assert not differences(tables, RESOLVED[name])
    assert json.dumps(tables, sort_keys=True) == json.dumps(RESOLVED[name], sort_keys=True)  # types too: 1 is not 1.0


def write() -> None:
    """Write all recipes, one per line."""
    lines = [f"{json.dumps(name)}: {json.dumps(as_tables(open_recipe(name)), sort_keys=True)}" for name in names()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()

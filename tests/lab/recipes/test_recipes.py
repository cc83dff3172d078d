"""The built-in recipes: all load, each says what it is, and a change is a change of what it extends."""

import dataclasses
import tomllib

import pytest

from repulsive.errors import ConfigError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.systems.registry import HERE, KINDS, find, from_tables, names, open_recipe

BASE = {"ma", "ma-own", "released-ma", "small-ma"}
METHODS = [name for name in names() if (find(name).parent / "ma.toml").is_file()]  # in other folders: a task each


@pytest.mark.parametrize("name", names())
def test_every_recipe_loads(name):
    recipe = open_recipe(name)
    assert recipe.label and recipe.task in KINDS
    rule = make_rule(recipe.method, num_data=1000, total_steps=100)
    assert (rule is None) == (recipe.method.rule == "none")
    assert from_tables(as_tables(recipe), name) == recipe  # as a run folder keeps it
    first, second = find(name).read_text().splitlines()[:2]
    assert first == f"# repulsive train {name}" and second.startswith("# ")


@pytest.mark.parametrize("name", [name for name in METHODS if name.rpartition("/")[2] not in BASE])
def test_a_method_differs_from_the_baseline_in_nothing_else(name):
    """Same data, model and length of training as plain attention of the same task; a sphere is no method of its own."""
    own, folder = tomllib.loads(find(name).read_text()), name.rpartition("/")[0]
    parent = (find(name).parent / own["extends"]).resolve()
    assert parent.is_file() and parent.is_relative_to(HERE)
    recipe, plain = open_recipe(name), open_recipe(parent)
    for table in (field.name for field in dataclasses.fields(recipe)):
        if table not in own and table != "label":
            assert getattr(recipe, table) == getattr(plain, table), table
    assert recipe.data == open_recipe(f"{folder}/ma").data
    assert recipe.seed == 0 and recipe.label != plain.label


@pytest.mark.parametrize("task", ["yelp", "age", "snli", "reviews", "movie-reviews"])
def test_recipes_read_what_prepare_writes_unless_told_otherwise(task):
    folders = {str(open_recipe(name).data.folder) for name in names() if name.startswith(f"{task}/")}
    assert folders == {f"prepared/{task}"}


@pytest.mark.parametrize(
    ("task", "optimizer", "lr", "hidden", "mlp", "alpha"),
    [
        ("yelp", "sgd", 0.06, 350, 3000, 1.0),
        ("age", "adam", 5e-4, 350, 2000, 0.01),
        ("snli", "adam", 5e-4, 150, 4000, 0.005),
    ],
)
def test_released_settings_are_those_of_the_early_code(task, optimizer, lr, hidden, mlp, alpha):
    """The commands its README has, and the defaults of `train_svgd.py`."""
    recipe = open_recipe(f"{task}/released-svgd")
    model, used, rule = recipe.model, recipe.optimizer, recipe.method
    assert (used.name, used.lr, used.weight_decay, used.clip) == (optimizer, lr, 0.0, 0.5)
    assert (model.units, model.hidden, model.heads, model.mlp, model.dropout) == (300, hidden, 30, mlp, 0.3)
    assert (rule.alpha, rule.stepsize, rule.order, recipe.training.batch) == (alpha, 1.0, "repel-clip", 128)


def test_labels_of_a_task_differ():
    for task in {name.partition("/")[0] for name in names()}:
        labels = [open_recipe(name).label for name in names() if name.startswith(f"{task}/")]
        assert len(set(labels)) == len(labels), labels


def test_what_is_not_there():
    with pytest.raises(ConfigError, match="did you mean 'yelp/svgd'"):
        find("yelp/svdg")
    with pytest.raises(ConfigError, match="`repulsive ls`"):
        find("nothing/of/the/kind")

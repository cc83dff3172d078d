"""Built-in recipes: all of them load, say what they are, and differ from their baseline in the method alone."""

import tomllib

import pytest

from repulsive import SVGD
from repulsive.errors import ConfigError
from repulsive.lab.engine.built_in import FOLDER, find, names, read_recipe, recipes
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.engine.recipe_tables import as_toml, differences, flatten, merge, read
from repulsive.lab.systems.registry import KINDS, from_tables, open_recipe

FILES = sorted(FOLDER.rglob("*.toml"))
DATASETS = [path for path in FILES if path.parent.name == "datasets"]
METHODS = [path for path in FILES if path.parent.name == "methods"]
# Methods that change more than the training of the heads.
OTHER_MODELS = {"ma-own": {"model.own_hidden", "model.hidden"}, "bert": {"objective"}}
OTHER_MODELS["svgd-own"] = OTHER_MODELS["ma-own"]


@pytest.mark.parametrize("name", names())
def test_every_recipe_loads(name):
    recipe = open_recipe(name)
    assert recipe.label and recipe.task in KINDS and recipe.seed == 0
    rule = make_rule(recipe.method, num_data=1000, total_steps=100)
    assert (rule is None) == (recipe.method.rule == "none")
    assert from_tables(as_tables(recipe), name) == recipe  # as a run folder keeps it
    assert from_tables(tomllib.loads(as_toml(as_tables(recipe))), name) == recipe  # as `repulsive ls` shows it


@pytest.mark.parametrize("path", DATASETS + METHODS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_opens_with_a_command_that_uses_it(path):
    first, second = path.read_text().splitlines()[:2]
    recipe = find(first.removeprefix("# repulsive train "))
    assert path in (recipe.dataset, recipe.method)
    assert second.startswith("# ")


def test_every_method_is_used():
    assert {recipe.method for recipe in recipes().values()} == set(METHODS)


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.stem)
def test_exceptions_are_for_methods_of_the_dataset(path):
    own = tomllib.loads(path.read_text())
    assert set(own.get("exceptions", {})) <= set(read(path)["methods"])


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.stem)
def test_no_exception_repeats_the_value_without_it(path):
    own = tomllib.loads(path.read_text())
    system = read(path.parent / own["extends"]).get("exceptions", {})
    for method, exception in own.get("exceptions", {}).items():
        plain = flatten(merge(merge(read(path), read(FOLDER / "methods" / f"{method}.toml")), system.get(method, {})))
        for key, value in flatten(exception).items():
            assert plain.get(key) != value, f"{method}: {key}"


@pytest.mark.parametrize("name", [name for name, recipe in recipes().items() if recipe.method.stem not in ("ma", "gw")])
def test_a_method_differs_from_the_baseline_in_nothing_else(name):
    """Same data, model and length of training as plain attention with the same dataset."""
    recipe = find(name)
    (baseline,) = (
        other for other in recipes().values() if other.dataset == recipe.dataset and other.method.stem in ("ma", "gw")
    )
    own, plain = as_tables(open_recipe(name)), as_tables(open_recipe(baseline.name))
    changed = set(differences(own, plain))
    assert "label" in changed
    others = {key for key in changed if not key.startswith("method.")} - {"label"}
    assert others <= OTHER_MODELS.get(recipe.method.stem, set())
    assert len(changed) > 1


def test_the_kernel_free_control_differs_from_svgd_in_the_rule_alone():
    """Every system that trains with SVGD has the control, with the same strength and the same heads."""
    controls = [name for name, recipe in recipes().items() if recipe.method.stem == "kernel-free"]
    assert {open_recipe(name).task for name in controls} == {"classification", "translation", "electra", "graphs", "lm"}
    for name in controls:
        published = name.replace("kernel-free", "rma" if open_recipe(name).task == "graphs" else "svgd")
        own, paper = (as_tables(open_recipe(each)) for each in (name, published))
        assert set(differences(own, paper)) == {"label", "method.rule"}, name


@pytest.mark.parametrize("task", ["yelp", "age", "snli", "reviews", "movie-reviews"])
def test_recipes_read_the_folder_that_prepare_writes(task):
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
    """The commands in its README, and the defaults of its `train_svgd.py`."""
    recipe = open_recipe(f"{task}/released-svgd")
    model, used, rule = recipe.model, recipe.optimizer, recipe.method
    assert (used.name, used.lr, used.weight_decay, used.clip) == (optimizer, lr, 0.0, 0.5)
    assert (model.units, model.hidden, model.heads, model.mlp, model.dropout) == (300, hidden, 30, mlp, 0.3)
    assert (rule.alpha, rule.stepsize, rule.order, recipe.training.batch) == (alpha, 1.0, "repel-clip", 128)
    for method in ("svgd", "spos"):
        assert open_recipe(f"{task}/released-{method}").method.bandwidth == "released-lower"  # that of torch.median


def test_the_rule_of_the_early_graph_writer_code_can_be_set():
    """It never multiplies by epsilon, and takes torch's lower median: docs/differences.md."""
    recipe = open_recipe("agenda/rma", ["method.stepsize=1.0", "method.bandwidth=released-lower"])
    assert make_rule(recipe.method, 100, 100) == SVGD(1.0, 0.01, bandwidth="released-lower")


def test_labels_of_a_task_differ():
    for task in {name.partition("/")[0] for name in names()}:
        labels = [open_recipe(name).label for name in names() if name.startswith(f"{task}/")]
        assert len(set(labels)) == len(labels), labels


def test_unknown_names_are_errors():
    with pytest.raises(ConfigError, match="did you mean 'yelp/svgd'"):
        read_recipe("yelp/svdg")
    with pytest.raises(ConfigError, match="`repulsive ls`"):
        read_recipe("nothing/of/the/kind")


def test_files_of_users_extend_built_in_recipes_and_each_other(tmp_path):
    (tmp_path / "mine").mkdir()
    first, second = tmp_path / "mine" / "first.toml", tmp_path / "second.toml"
    first.write_text('extends = "yelp/svgd"\nlabel = "first"\n[model]\nheads = 10\n')
    second.write_text('extends = "mine/first.toml"\n[method]\nratio = 0.5\n')
    built_in, recipe = as_tables(open_recipe("yelp/svgd")), as_tables(open_recipe(second, ["seed=3"]))
    assert set(differences(built_in, recipe)) == {"label", "model.heads", "method.ratio", "seed"}
    second.write_text('extends = "yelp/svdg"\n')
    with pytest.raises(ConfigError, match=r"second\.toml: extends: yelp/svdg: neither .*did you mean 'yelp/svgd'"):
        open_recipe(second)
    second.write_text('extends = "third.toml"\n')
    with pytest.raises(ConfigError, match=r"second\.toml: extends: third\.toml: no such file beside second"):
        open_recipe(second)


def test_a_parent_relative_to_the_working_directory_can_not_extend_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "first.toml").write_text('extends = "mine/first.toml"\n')
    with pytest.raises(ConfigError, match="extends itself"):
        read_recipe("mine/first.toml")

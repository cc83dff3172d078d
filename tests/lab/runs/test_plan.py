"""From words on a command line to folders."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from repulsive.errors import ConfigError
from repulsive.lab.runs.plan import _AMBIGUOUS, check_device, folder_name, plan
from repulsive.lab.systems.registry import KINDS


@pytest.mark.parametrize(
    ("recipe", "changes", "name"),
    [
        ("yelp/svgd", [], "yelp/svgd"),
        ("yelp/svgd", ["method.alpha=0.3"], "yelp/svgd+alpha=0.3"),
        ("yelp/svgd", ["method.alpha=0.3", "seed=4"], "yelp/svgd+alpha=0.3+seed=4"),
        ("yelp/svgd", [" method.alpha = 0.3"], "yelp/svgd+alpha=0.3"),
        ("yelp/svgd", ["method.schedule=linear"], "yelp/svgd+method.schedule=linear"),
        ("yelp/svgd", ["optimizer.schedule=linear"], "yelp/svgd+optimizer.schedule=linear"),
        ("yelp/svgd", ["label=two words"], "yelp/svgd+label=two_words"),
        ("yelp/svgd", ["data.folder=/some/where else"], "yelp/svgd+folder=_some_where_else"),
        ("yelp/svgd", ["data.folder=../../x"], "yelp/svgd+folder=.._.._x"),
        ("yelp/svgd", ["label=a\nb\t*?<>|:\\"], "yelp/svgd+label=a_b_"),
        ("some/where/mine.toml", ["optimizer.betas=[0.9, 0.98]"], "mine+betas=_0.9_0.98_"),
    ],
)
def test_names(recipe, changes, name):
    assert folder_name(recipe, changes) == name


@pytest.mark.parametrize("text", ["x" * 500, "ü" * 100, "/" * 300 + "y" * 130])
def test_long_values_fit_a_file_system(text):
    name = folder_name("yelp/svgd", [f"label={text}"])
    assert len(Path(name).name.encode()) < 150 and name.startswith("yelp/svgd+")
    assert name != folder_name("yelp/svgd", [f"label={text}y"])
    assert name == folder_name("yelp/svgd", [f"label={text}"])


def test_a_file_without_an_ending_stays_below_the_folder_of_runs(tmp_path):
    path = tmp_path / "recipe"
    path.write_text('task = "classification"\ndata.folder = "x"\n')
    (spec,) = plan([str(path)], out=tmp_path / "out")
    assert spec.folder == tmp_path / "out" / "recipe" / "seed-0"


def test_keys_of_more_than_one_table_keep_its_name():
    seen = set()  # over all tasks: a table they share is one table
    for kind, _ in KINDS.values():
        for field in dataclasses.fields(kind):
            inner = field.default_factory if dataclasses.is_dataclass(field.default_factory) else None
            seen |= {(field.name, leaf.name) for leaf in dataclasses.fields(inner)} if inner else {("", field.name)}
    leaves = Counter(leaf for _, leaf in seen)
    assert {leaf for leaf, times in leaves.items() if times > 1} == _AMBIGUOUS


def test_seeds(tmp_path):
    found = plan(["reviews/ma", "reviews/svgd"], ["training.epochs=1"], seeds=2, out=tmp_path, device="cpu")
    assert [(spec.folder.relative_to(tmp_path).as_posix(), spec.recipe.seed) for spec in found] == [
        ("reviews/ma+epochs=1/seed-0", 0),
        ("reviews/ma+epochs=1/seed-1", 1),
        ("reviews/svgd+epochs=1/seed-0", 0),
        ("reviews/svgd+epochs=1/seed-1", 1),
    ]
    assert {spec.recipe.training.epochs for spec in found} == {1}
    (spec,) = plan(["reviews/ma"], ["seed=5"], out=tmp_path)
    assert (spec.recipe.seed, spec.folder.name) == (5, "seed-5")
    (spec,) = plan(["reviews/ma"], ["seed=5"], seed=6, out=tmp_path)
    assert (spec.recipe.seed, spec.folder.name) == (6, "seed-6")
    with pytest.raises(ConfigError, match="two runs would share"):
        plan(["reviews/ma", "reviews/ma"], out=tmp_path)
    with pytest.raises(ConfigError, match="choose cpu or cuda"):
        check_device("tpu")

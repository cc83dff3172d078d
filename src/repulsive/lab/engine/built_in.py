"""Built-in recipes: each dataset of lab/recipes/datasets combined with each of its methods from lab/recipes/methods.

A recipe is merged from these files; later ones win:

1. the dataset's file, with the system's file that it extends;
2. the method's file;
3. the dataset's exceptions for the method, such as `[exceptions.svgd.method] ratio = 0.3`.

Three keys of a dataset's file describe its recipes and are not copied into them: `name`, such as "yelp/{method}";
`methods`, the baseline first; and `exceptions`. "{method}" in its `label` is replaced by the method's label.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import ConfigError
from repulsive.lab.engine import recipe_tables
from repulsive.lab.engine.recipe_tables import Tables

FOLDER = Path(__file__).parents[1] / "recipes"
_PLACEHOLDER = "{method}"


@dataclass(frozen=True)
class BuiltIn:
    """A built-in recipe.

    Args:
        name: such as "yelp/svgd".
        dataset: file of the dataset.
        method: file of the method.
        description: one line about the method; for a baseline about the dataset too.
    """

    name: str
    dataset: Path
    method: Path
    description: str

    def tables(self) -> Tables:
        """Merge the recipe's files."""
        dataset, method = recipe_tables.read(self.dataset), recipe_tables.read(self.method)
        label = dataset.pop("label", _PLACEHOLDER).replace(_PLACEHOLDER, method["label"])
        exceptions = dataset.pop("exceptions", {}).get(self.method.stem, {})
        for key in ("name", "methods"):
            del dataset[key]
        return recipe_tables.merge(recipe_tables.merge(dataset, method), exceptions) | {"label": label}


@functools.cache
def recipes() -> dict[str, BuiltIn]:
    """Return all built-in recipes, sorted by name."""
    listed = {}
    for path in (FOLDER / "datasets").glob("*.toml"):
        dataset = recipe_tables.read(path)
        methods = dataset["methods"]
        for method in methods:
            name = dataset["name"].replace(_PLACEHOLDER, method)
            file = FOLDER / "methods" / f"{method}.toml"
            description = [_description(path)] if method == methods[0] else []
            if len(methods) > 1:
                description.append(_description(file))
            listed[name] = BuiltIn(name, path, file, " ".join(description))
    return dict(sorted(listed.items()))


def names() -> list[str]:
    """Return the names of the built-in recipes, such as "yelp/svgd"."""
    return list(recipes())


def find(name: str) -> BuiltIn:
    """Find a built-in recipe by its name.

    Raises:
        ConfigError: no recipe has this name.
    """
    if name in recipes():
        return recipes()[name]
    close = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`repulsive ls` lists the built-in recipes"
    if re.match(r"[\w.]+=", name):
        hint = f"to change a setting, write --set {name}"
    elif not close and Path(name).is_dir():
        hint += f", and `repulsive ls --out {name}` the runs in a folder"
    raise ConfigError(f"{name}: neither a file nor a built-in recipe; {hint}")


def read_recipe(name: str | Path) -> Tables:
    """Read the tables of a recipe, given the path of a TOML file or the name of a built-in recipe.

    Raises:
        ConfigError: there is no such file or recipe, or the file is not TOML.
    """
    if recipe_tables.is_file_name(name):
        return recipe_tables.read(Path(name), lambda parent: find(parent).tables())
    return find(str(name)).tables()


def _description(path: Path) -> str:
    """Return the comment in the second line of a recipe's file; the first line is the command that runs the recipe."""
    return path.read_text(encoding="utf-8").splitlines()[1].removeprefix("#").strip()

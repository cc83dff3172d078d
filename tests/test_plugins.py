"""Packages of other people add families, rules and tasks by entry points."""

import importlib
import json
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from repulsive import RuleError, find_heads, plugins, repel, verify_heads
from repulsive.environment.collect import collect
from repulsive.environment.describe import describe
from repulsive.errors import ConfigError
from repulsive.heads.table.families import FAMILIES
from repulsive.heads.table.known_families import known_families
from repulsive.loggers.open_loggers import check_loggers
from repulsive.particles import RULES, rule_by_name
from repulsive.particles.named import known_rules

PACKAGE = Path(__file__).parent / "plugin_package"
RECIPE = """
task = "parity"
label = "plain"
[training]
epochs = 2
batch = 16
"""


def forget() -> None:
    importlib.invalidate_caches()
    plugins.load_plugins.cache_clear()
    known_families.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("blends", "broken_plugin")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write the metadata that pip would write, into a folder on sys.path."""

    def write(name: str, groups: dict[str, dict[str, str]], **modules: str) -> Path:
        folder = tmp_path / "site"
        info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        forget()
        return folder

    forget()
    yield write
    forget()


@pytest.fixture
def blends(install, monkeypatch) -> Path:
    """The example package, with the entry points of its pyproject.toml."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    return install(project["name"], project["entry-points"])


def test_a_family_is_found_as_part_of_the_table_and_proved(blends):
    from blends.attention import Blend

    torch.manual_seed(0)
    model, example = Blend(), torch.randn(2, 5, 12)
    groups = find_heads(model)
    assert [(group.family, group.part, group.proof) for group in groups] == [("blend", p, "table") for p in "qkv"]
    assert {line.status for line in verify_heads(model, example, groups)} == {"verified"}
    assert repel(model, torch.optim.Adam(model.parameters()), verbose=False) is not None  # no guess: no refusal
    assert len(known_families()) == len(FAMILIES) + 1


def test_without_the_package_the_class_is_not_known(install):
    sys.path.insert(0, str(PACKAGE))
    try:
        from blends.attention import Blend

        groups = find_heads(Blend(), torch.randn(2, 5, 12))
    finally:
        sys.path.remove(str(PACKAGE))
    assert {group.family for group in groups} != {"blend"}
    assert known_families() == FAMILIES


def test_a_row_of_the_own_package_wins_over_a_namesake(install, monkeypatch):
    """A class that has the name of another package's class is not read with that package's layout."""
    module = """
from torch import nn
from repulsive.heads.table.families import Family

class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj = self.k_proj = self.v_proj = nn.Linear(8, 8)
        self.packed = nn.Linear(8, 24)

FAMILY = [Family("own-llama", ("LlamaAttention",), (("packed", "head qkv dim"),), package="broken_plugin")]
"""
    install("namesake", {"repulsive.families": {"own": "broken_plugin:FAMILY"}}, broken_plugin=module)
    from broken_plugin import LlamaAttention

    assert {(group.family, group.proof) for group in find_heads(LlamaAttention())} == {("own-llama", "table")}


def test_a_rule_has_a_name(blends):
    from blends.rule import Scaled

    assert rule_by_name("scaled") == Scaled()
    assert list(known_rules()) == [*RULES, "scaled"]
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    handle = repel(model, torch.optim.Adam(model.parameters()), "scaled", verbose=False)
    assert handle.rule == Scaled()
    theta, grad = torch.randn(4, 10), torch.randn(4, 10)
    assert torch.allclose(rule_by_name("scaled").gradient(theta, grad), 0.1 / 4 * grad)
    with pytest.raises(RuleError, match="did you mean 'scaled'"):
        rule_by_name("scalde")
    with pytest.raises(RuleError, match=r"one of the names .*scaled, or None"):
        repel(model, torch.optim.Adam(model.parameters()), 3)


def test_a_task_trains(blends, tmp_path):
    from repulsive.lab.engine.launch import Spec, train_here
    from repulsive.lab.systems.registry import KINDS, known_tasks, make_task, open_recipe

    (tmp_path / "plain.toml").write_text(RECIPE)
    recipe = open_recipe(tmp_path / "plain.toml", ["items=48"])
    assert type(recipe).__name__ == "Parity" and recipe.items == 48
    assert list(known_tasks()) == [*KINDS, "parity"]
    result = train_here(Spec(recipe, tmp_path / "run", "cpu"), make_task, quiet=True)
    assert 0 < result["test"]["nll"] < 5


def test_a_logger_receives_what_metrics_has(blends, tmp_path):
    from repulsive.lab.engine.launch import Spec, train_here
    from repulsive.lab.systems.registry import make_task, open_recipe

    (tmp_path / "plain.toml").write_text(RECIPE)
    run = tmp_path / "run"
    train_here(Spec(open_recipe(tmp_path / "plain.toml"), run, "cpu", ("lines",)), make_task, quiet=True)
    first, *logged = [json.loads(line) for line in (run / "lines.jsonl").read_text().splitlines()]
    assert first["name"].endswith("/run") and first["epochs"] == 2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged == [
        {"step": line["step"]} | {f"{line['kind']}/{k}": v for k, v in line.items() if k not in ("kind", "step")}
        for line in metrics
    ]
    assert {"train/loss", "dev/nll"} <= {name for line in logged for name in line}


def test_an_unknown_task_lists_those_of_other_packages(blends, tmp_path):
    from repulsive.lab.systems.registry import open_recipe

    (tmp_path / "plain.toml").write_text(RECIPE.replace("parity", "partiy"))
    with pytest.raises(ConfigError, match=r"task must be one of classification.*, parity, not 'partiy'"):
        open_recipe(tmp_path / "plain.toml")


BROKEN = {
    "import": ("repulsive.rules", "broken_plugin:missing", "", "AttributeError: module 'broken_plugin' has no"),
    "error": ("repulsive.families", "broken_plugin:x", "raise OSError('no\\nlicence')", "OSError: no licence"),
    "module": ("repulsive.tasks", "no_such_module:x", "", "ModuleNotFoundError: No module named 'no_such_module'"),
    "family": ("repulsive.families", "broken_plugin:x", "x = 3", "expected a Family or a list of them, got int"),
    "families": ("repulsive.families", "broken_plugin:x", "x = []", "expected a Family or a list of them, got list"),
    "signature": (
        "repulsive.families",
        "broken_plugin:x",
        "from repulsive.heads.table.families import Family\nx = Family('any', ('*',), (('q', 'q head dim'),))",
        "needs the names of its classes and the package",
    ),
    "taken family": (
        "repulsive.families",
        "broken_plugin:x",
        "from repulsive.heads.table.families import Family\nx = Family('bert', ('A',), (), package='a')",
        "the name 'bert' belongs to a built-in family",
    ),
    "rule": ("repulsive.rules", "broken_plugin:x", "x = 3", "expected a function that returns a Rule, got int"),
    "task": ("repulsive.tasks", "broken_plugin:x", "x = 3", "expected a pair (recipe class, task class), got int"),
    "logger": ("repulsive.loggers", "broken_plugin:x", "x = 3", "expected a function that takes a LoggedRun, got int"),
    "recipe": ("repulsive.tasks", "broken_plugin:x", "x = (int, int)", "expected a subclass of Recipe"),
}


def use(group: str) -> None:
    """Do what loads the group: with something that is built in, or unknown."""
    if group == plugins.FAMILIES:
        assert len(find_heads(torch.nn.MultiheadAttention(8, 2))) == 3
        assert known_families() == FAMILIES
    elif group == plugins.RULES:
        with pytest.raises(RuleError, match="unknown rule 'mine'"):
            rule_by_name("mine")
    elif group == plugins.LOGGERS:
        with pytest.raises(ConfigError, match="unknown logger 'mine'; choose from tensorboard, wandb, mlflow, trackio"):
            check_loggers(["mine"])
    else:
        from repulsive.lab.systems.registry import from_tables

        with pytest.raises(ConfigError, match="task must be one of"):
            from_tables({"task": "mine"}, "here")


@pytest.mark.parametrize(("group", "target", "module", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_package_gives_one_warning_and_nothing_else(install, group, target, module, reason):
    install("broken-plugin", {group: {"mine": target}}, broken_plugin=module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(group)
        use(group)  # the second use does not warn again
    (warning,) = [one for one in caught if one.category is plugins.PluginWarning]
    text = str(warning.message)
    assert text.startswith(f"the package 'broken-plugin' is ignored as a plugin: its entry point 'mine' in {group} (")
    assert reason in text and text.endswith("; update or uninstall broken-plugin") and "\n" not in text


@pytest.mark.parametrize(("group", "name"), [("repulsive.rules", "paper"), ("repulsive.tasks", "glue")])
def test_built_in_names_cannot_be_replaced(install, group, name):
    from repulsive.lab.systems.registry import KINDS, known_tasks

    install("broken-plugin", {group: {name: "broken_plugin:x"}}, broken_plugin="def x(): raise SystemExit")
    with pytest.warns(plugins.PluginWarning, match="has this name; choose another"):
        known = known_rules() if group == plugins.RULES else known_tasks()
    assert known == (RULES if group == plugins.RULES else KINDS)


def test_the_first_of_two_packages_keeps_the_name(install):
    module = "from repulsive import SGLD, SVGD"
    install("a-package", {"repulsive.rules": {"mine": "broken_plugin:SVGD"}}, broken_plugin=module)
    install("b-package", {"repulsive.rules": {"mine": "broken_plugin:SGLD"}})
    with pytest.warns(plugins.PluginWarning, match="'b-package'.*another package has an entry point of this name"):
        assert type(rule_by_name("mine")).__name__ == "SVGD"


def test_a_function_that_returns_no_rule_is_an_error(install):
    install("broken-plugin", {"repulsive.rules": {"mine": "broken_plugin:x"}}, broken_plugin="def x(): return 3")
    with pytest.raises(RuleError, match="the function of rule 'mine' returned an object of type int, not a Rule"):
        rule_by_name("mine")


def test_doctor_lists_plugins_without_importing_them(blends):
    text = describe(collect())
    for line in ("families: blend", "rules: scaled", "tasks: parity", "loggers: lines"):
        assert f"\n  repulsive.{line} of blends" in text
    assert "blends" not in sys.modules


def test_importing_repulsive_and_naming_a_built_in_rule_read_no_entry_points(install):
    folder = install(
        "broken-plugin",
        {group: {"mine": "broken_plugin:x"} for group in plugins.GROUPS},
        broken_plugin="raise SystemExit('imported')",
    )
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import repulsive\n"
        "from repulsive import *\n"
        "import repulsive.lab.systems.registry, repulsive.heads.table.match\n"
        "from repulsive.particles import rule_by_name\n"
        "rule_by_name('paper')\n"
        "assert 'broken_plugin' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""Imports go downwards only, and importing the package changes nothing.

`BELOW` is the layering of docs/architecture.md as data: each package, and what of ours it may import.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "repulsive"

API = "repulsive"  # the top-level package itself: `from repulsive import repel`
CORE = {"errors", "safety", "particles", "heads", "repulsion"}
PLAIN = {"errors", "models", "data", "metrics"}
TRAINING = CORE | PLAIN | {API, "_version", "integrations", "regularizers", "diagnostics"}
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "safety": {"errors"},
    "_version": set(),
    "__main__": {"errors", "cli"},
    "particles": {"errors"},
    "heads": {"errors"},
    "repulsion": {"errors", "safety", "particles", "heads"},
    API: CORE | {"_version"},
    "integrations": CORE | {API, "_version"},
    "regularizers": {"errors", "heads"},
    "models": {"errors", "safety"},
    "data": {"errors", "safety"},
    "metrics": {"errors"},
    "diagnostics": CORE | {API, "regularizers", "metrics"},
    "bench": CORE | PLAIN | {API, "_version", "regularizers"},
    "training": TRAINING,
    "recipes": TRAINING | {"training"},
    "judge": {"errors", "safety", "diagnostics"},
    "reproduce": TRAINING | {"bench", "training", "recipes", "judge"},
    "cli": TRAINING | {"bench", "training", "recipes", "judge", "reproduce"},
}
THIRD_PARTY_OF_CORE = {"torch", "triton"}  # triton: fused kernels, in files that nothing imports by itself
OPTIONAL = ("transformers", "tokenizers", "accelerate", "lightning", "pytorch_lightning", "torch_geometric", "peft")
HEAVY = (*OPTIONAL, "spacy", "matplotlib", "typer", "rich", "sacrebleu", "optuna", "scipy", "sklearn", "pandas")


def package_of(module: str) -> str:
    """`repulsive.heads.layout` -> `heads`; `repulsive` -> `repulsive`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else API


def module_name(path: Path) -> str:
    parts = ("repulsive", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(code: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, full module name) of every import, wherever it stands: in a function and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            if base == API:  # `from repulsive import heads` means the package, `import repel` the API
                found += [(node.lineno, f"{base}.{a.name}" if a.name in BELOW else base) for a in node.names]
            else:
                found.append((node.lineno, base))
    return found


def upward_imports(code: str, module: str, is_package: bool = False) -> list[str]:
    """One line of text per import of ours that the module's package may not make."""
    own = package_of(module)
    return [
        f"{module}:{line} imports {target}: {own} may import only {sorted(BELOW[own]) or 'nothing'} of ours"
        for line, target in imported_modules(code, module, is_package)
        if target.split(".")[0] == API and package_of(target) != own and package_of(target) not in BELOW[own]
    ]


def eager_third_party(code: str) -> set[str]:
    """Foreign packages that importing this code loads: imports outside functions and TYPE_CHECKING blocks."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                visit(node.orelse)
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for block in ("body", "orelse", "finalbody"):
                    visit(getattr(node, block, []))
                for handler in getattr(node, "handlers", []):
                    visit(handler.body)

    visit(ast.parse(code).body)
    return found - set(sys.stdlib_module_names) - {API}


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_package_has_a_place_in_the_layering():
    packages = {package_of(module_name(path)) for path in FILES}
    assert {"particles", "heads", "repulsion", "cli"} <= packages
    assert packages <= set(BELOW), f"give these a line in BELOW and in docs/architecture.md: {packages - set(BELOW)}"


def test_the_layering_has_no_cycle():
    def reachable(package: str) -> set[str]:
        return set().union(BELOW[package], *(reachable(below) for below in BELOW[package]))

    assert [package for package in BELOW if package in reachable(package)] == []


def test_the_architecture_page_has_the_same_layering():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.M)
    told: dict[str, set[str]] = {}
    for package, allowed in rows:
        named = set(re.findall(r"`(\w+)`", allowed))
        told[package] = set(told) - named if allowed.startswith("all above") else named | {"errors"} & set(told)
    assert told == {package: below - {"_version"} for package, below in BELOW.items() if package != "_version"}


@pytest.mark.parametrize("package", ["particles", "heads", "models", "data", "metrics"])
def test_packages_kept_apart_know_only_errors_and_safety(package):
    assert BELOW[package] <= {"errors", "safety"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path):
    assert upward_imports(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "path", [p for p in FILES if package_of(module_name(p)) in CORE | {API}], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_core_loads_torch_alone(path):
    assert eager_third_party(path.read_text()) <= THIRD_PARTY_OF_CORE


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("repulsive.particles.svgd", "from repulsive.heads import find_heads"),
        ("repulsive.particles.svgd", "import repulsive.heads.layout"),
        ("repulsive.particles.svgd", "from ..repulsion import attach"),
        ("repulsive.heads.discover", "from repulsive.particles import SVGD"),
        ("repulsive.heads.discover", "from repulsive import SVGD"),
        ("repulsive.repulsion.attach", "from repulsive import integrations"),
        ("repulsive.repulsion.attach", "def f():\n    from repulsive.cli import main"),
        ("repulsive.lab.systems.electra.model", "from repulsive.heads import find_heads"),
        ("repulsive.lab.systems.electra.model", "if TYPE_CHECKING:\n    import repulsive.repulsion"),
        ("repulsive.integrations.accelerate", "from repulsive.training import loop"),
    ],
)
def test_the_checker_sees_an_upward_import(module, code):
    assert len(upward_imports(code, module)) == 1


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("repulsive.particles.svgd", "import repulsive.errors\nfrom repulsive.particles.kernels import RBF"),
        ("repulsive.particles.svgd", "from .kernels import RBF"),
        ("repulsive.repulsion.attach", "from repulsive.heads import find_heads\nfrom ..particles import SVGD"),
        ("repulsive.integrations.trainer", "from repulsive import repel"),
        ("repulsive.cli.heads", "from repulsive.heads import describe"),
    ],
)
def test_the_checker_lets_a_downward_import_pass(module, code):
    assert upward_imports(code, module) == []


def test_the_checker_sees_an_eager_import_and_not_a_lazy_one():
    code = "import os\ntry:\n    import rich\nexcept ImportError:\n    import peft\ndef f():\n    import typer\n"
    assert eager_third_party(code) == {"rich", "peft"}


PROBE = """
import json, logging, os, sys
import torch

def handlers():
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    return sorted((logger.name, repr(handler)) for logger in loggers for handler in logger.handlers)

before = dict(os.environ), handlers(), list(sys.path), torch.get_num_threads(), torch.random.get_rng_state().tolist()
import repulsive
after = dict(os.environ), handlers(), list(sys.path), torch.get_num_threads(), torch.random.get_rng_state().tolist()
names = ["environment", "logging handlers", "sys.path", "torch threads", "random state"]
print(json.dumps({
    "changed": [name for name, old, new in zip(names, before, after) if old != new],
    "loaded": sorted({name.split(".")[0] for name in sys.modules}),
    "submodules": sorted(name for name in sys.modules if name.startswith("repulsive.")),
}))
"""


def test_import_repulsive_loads_nothing_heavy_and_changes_nothing():
    finished = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    seen = json.loads(finished.stdout)
    assert seen["changed"] == []
    assert set(seen["loaded"]) & set(HEAVY) == set()
    assert [name for name in seen["submodules"] if name.split(".")[1] in ("cli", "integrations", "models")] == []
    assert finished.stderr == ""

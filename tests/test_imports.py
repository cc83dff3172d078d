"""Imports between modules go one way, and importing the package changes nothing.

The layering is the table in docs/architecture.md: each package, and the packages that it may import.
"""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "repulsive"
PAGE = SOURCE.parents[1] / "docs" / "architecture.md"
API = "repulsive"  # the top-level package itself: `from repulsive import repel`
SYSTEM = "lab.systems.*"

CORE = ("errors", "safety", "particles", "heads", "repulsion", "regularizers", API)
THIRD_PARTY_OF_CORE = {"torch", "triton"}  # triton: in files that are imported only where Triton is used
OPTIONAL = ("transformers", "tokenizers", "accelerate", "lightning", "pytorch_lightning", "torch_geometric", "peft")
HEAVY = ("torch", *OPTIONAL, "spacy", "matplotlib", "typer", "rich", "sacrebleu", "optuna", "scipy", "sklearn")


def module_name(path: Path) -> str:
    """`src/repulsive/heads/layout.py` -> `repulsive.heads.layout`."""
    parts = (API, *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def layering() -> dict[str, frozenset[str]]:
    """Each package of the page's table, and the packages that it may import."""
    rows = re.findall(r"^\| `([\w.*]+)` \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    allowed: dict[str, frozenset[str]] = {}
    for package, text in rows:
        names = set(re.findall(r"`([\w.*]+)`", text.replace("all of `lab` above", "")))
        if "the library" in text:
            names |= {name for name in allowed if name.split(".")[0] != "lab"}
        if "all of `lab` above" in text:
            names |= {name for name in allowed if name.split(".")[0] == "lab"}
        allowed[package] = frozenset(names)
    return allowed


def package_of(module: str) -> str:
    """`repulsive.heads.layout` -> `heads`; a module of a system -> `lab.systems.<system>`."""
    parts = module.split(".")[1:]
    if parts[:2] == ["lab", "systems"]:
        is_system = len(parts) > 2 and (SOURCE / "lab" / "systems" / parts[2]).is_dir()
        return ".".join(parts[:3]) if is_system else "lab.systems"
    return ".".join(parts[:2]) if parts[:1] == ["lab"] else parts[0] if parts else API


def row_of(package: str) -> str:
    """The table's row of a package."""
    return SYSTEM if package.startswith("lab.systems.") else package


def imported_modules(code: str, module: str, is_package: bool = False) -> set[str]:
    """Our modules that `code` imports anywhere: in functions and under TYPE_CHECKING, too."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:  # `from repulsive.lab.text import lines` imports a module, not a name
                names.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base)
    return {name for name in names if name.split(".")[0] == API} - {module}


def forbidden_imports(code: str, module: str, is_package: bool = False) -> list[str]:
    """One line for each import of ours that the module's package may not make."""
    own = package_of(module)
    allowed = layering()[row_of(own)]
    targets = ((target, package_of(target)) for target in sorted(imported_modules(code, module, is_package)))
    return [
        f"{module} imports {target}: {row_of(own)} may import {', '.join(sorted(allowed)) or 'nothing'} of ours"
        for target, package in targets
        if package != own and row_of(package) not in allowed
    ]


@cache
def graph() -> dict[str, set[str]]:
    return {
        module: imported_modules(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        for module, path in MODULES.items()
    }


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for target in sorted(edges.get(module, ())):
            if cycle := visit(target, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in edges if (cycle := visit(module, []))), [])


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


def test_every_package_has_a_row_in_the_architecture_page_and_every_row_a_package():
    packages = {row_of(package_of(module)) for module in MODULES}
    assert packages == set(layering())


def test_the_layering_has_no_cycle():
    assert find_cycle({package: set(below) for package, below in layering().items()}) == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layering(module):
    path = MODULES[module]
    assert forbidden_imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


def test_no_two_modules_import_each_other():
    assert find_cycle(graph()) == []


def test_the_library_does_not_import_the_laboratory():
    assert [
        (module, target)
        for module, targets in graph().items()
        for target in targets
        if package_of(target).startswith("lab") and not package_of(module).startswith(("lab", "cli"))
    ] == []


def test_models_do_not_know_repulsion():
    """A model of a system, and the layers it is built of, reach neither `heads` nor `repulsion` through any import."""
    models = [module for module in MODULES if re.fullmatch(r"repulsive\.lab\.systems\.\w+\.(model|attention)", module)]
    models += [module for module in MODULES if module.startswith("repulsive.lab.layers.")]
    assert len(models) > 10
    for model in models:
        reached, waiting = {model}, [model]
        while waiting:
            more = graph().get(waiting.pop(), set()) - reached
            reached |= more
            waiting += more
        assert {package_of(module) for module in reached} & {"heads", "repulsion", "particles", API} == set(), model


@pytest.mark.parametrize("module", [module for module in MODULES if package_of(module) in CORE])
def test_core_loads_torch_only(module):
    assert eager_third_party(MODULES[module].read_text(encoding="utf-8")) <= THIRD_PARTY_OF_CORE


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
        ("repulsive.lab.systems.glue.task", "from repulsive.lab.systems.translation import task"),
        ("repulsive.lab.text.lines", "if TYPE_CHECKING:\n    import repulsive.lab.systems.glue.task"),
        ("repulsive.diagnostics.prune", "from repulsive.lab.engine import loop"),
    ],
)
def test_the_checker_finds_a_forbidden_import(module, code):
    assert len(forbidden_imports(code, module)) == 1


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("repulsive.particles.svgd", "import repulsive.errors\nfrom repulsive.particles.kernels import RBF"),
        ("repulsive.particles.svgd", "from .kernels import RBF"),
        ("repulsive.repulsion.attach", "from repulsive.heads import find_heads\nfrom ..particles import SVGD"),
        ("repulsive.integrations.trainer", "from repulsive import repel"),
        ("repulsive.cli.heads", "from repulsive.heads import describe"),
        ("repulsive.lab.systems.glue.task", "from repulsive.lab.systems.glue import model"),
    ],
)
def test_the_checker_accepts_an_allowed_import(module, code):
    assert forbidden_imports(code, module) == []


def test_the_checker_finds_a_cycle():
    assert set(find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_checker_distinguishes_eager_from_lazy_imports():
    code = "import os\ntry:\n    import rich\nexcept ImportError:\n    import peft\ndef f():\n    import typer\n"
    assert eager_third_party(code) == {"rich", "peft"}


PROBE = """
import json, logging, os, random, sys

def handlers():
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    return sorted((logger.name, repr(handler)) for logger in loggers for handler in logger.handlers)

def state():
    return dict(os.environ), handlers(), list(sys.path), hash(random.getstate())

before = state()
import repulsive
names = ["environment", "logging handlers", "sys.path", "random state"]
changed = [name for name, old, new in zip(names, before, state()) if old != new]
assert repulsive.RuleError  # needs no torch
loaded = sorted({name.split(".")[0] for name in sys.modules})
import torch
before = torch.get_num_threads(), torch.random.get_rng_state().tolist()
from repulsive import *
assert repulsive.particles.SVGD is SVGD and repulsive.repel is repel
after = torch.get_num_threads(), torch.random.get_rng_state().tolist()
changed += [name for name, old, new in zip(["torch threads", "torch random state"], before, after) if old != new]
print(json.dumps({
    "changed": changed,
    "loaded": loaded,
    "with names": sorted({name.split(".")[0] for name in sys.modules}),
    "submodules": sorted(name for name in sys.modules if name.startswith("repulsive.")),
}))
"""


def test_import_repulsive_loads_nothing_heavy_and_changes_nothing():
    finished = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    result = json.loads(finished.stdout)
    assert result["changed"] == []
    assert set(result["loaded"]) & set(HEAVY) == set()
    assert set(result["with names"]) & set(HEAVY) == {"torch"}
    assert [name for name in result["submodules"] if name.split(".")[1] in ("cli", "integrations", "lab")] == []
    assert finished.stderr == ""

"""What is built of the package, and that it installs and runs where there is nothing else."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import repulsive
from repulsive.environment.requirements import read_requirements

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
FOLDERS = ("src", "tests", "docs", "examples", "studies")
BESIDE = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "constraints.txt",
    "mkdocs.yml",
    ".pre-commit-config.yaml",
)
DATA = (
    "py.typed",
    "pages/html/*.css",
    "pages/html/*.js",
    "lab/judge/*.css",
    "lab/judge/*.js",
    "lab/paper/published.toml",
    "lab/recipes/base.toml",
    "lab/recipes/datasets/*.toml",
    "lab/recipes/methods/*.toml",
    "lab/recipes/systems/*.toml",
)
SMALLEST = ("--seeds", "1", "--set", "training.epochs=1", "--set", "training.batch=512")


def data_files() -> set[str]:
    """Every file below `src` that is no module, nor bytecode, which other processes may be writing."""
    files = (path for path in (SOURCE / "repulsive").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(SOURCE).as_posix() for path in files if path.suffix != ".py"}


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that is built of it."""
    place = tmp_path_factory.mktemp("build")
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for folder in (*FOLDERS, "results", ".github"):
        shutil.copytree(ROOT / folder, place / "tree" / folder, ignore=leave)
    for name in BESIDE:
        shutil.copy(ROOT / name, place / "tree" / name)
    done = ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", place / "tree")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return place / "dist"


def ran(*words: str | Path, cwd: Path | None = None, limit: float = 600) -> subprocess.CompletedProcess[str]:
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    alone["OMP_NUM_THREADS"] = "1"
    words = tuple(map(str, words))
    return subprocess.run(words, cwd=cwd, env=alone, capture_output=True, text=True, check=False, timeout=limit)


def the_wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_holds_every_module_and_every_data_file(built):
    with zipfile.ZipFile(the_wheel(built)) as wheel:
        names = set(wheel.namelist())
    wanted = data_files()
    for pattern in DATA:  # or this test would look for nothing
        assert [name for name in wanted if fnmatchcase(name, f"repulsive/{pattern}")], pattern
    modules = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    assert "repulsive/lab/systems/classification/generated.py" in modules  # of the demo
    assert wanted | modules == {name for name in names if name.startswith("repulsive/")}
    assert {name.split("/")[0] for name in names if not name.startswith("repulsive/")} == {
        f"repulsive-{repulsive.__version__}.dist-info"
    }


def test_the_wheel_says_what_the_project_says(built):
    with zipfile.ZipFile(the_wheel(built)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        told = message_from_bytes(wheel.read(name))
    assert told["Version"] == repulsive.__version__
    assert {"train", "cli", "transformers", "report"} <= set(told.get_all("Provides-Extra"))
    always = [word for word in told.get_all("Requires-Dist") if "extra ==" not in word]
    assert len(always) == 1 and always[0].startswith("torch")


UNPACKED = """
import sys
sys.path.insert(0, sys.argv[1])  # the unpacked wheel wins over an editable installation
import repulsive
from repulsive import repel
from repulsive.cli.app import run
from repulsive.environment.collect import collect
from repulsive.pages.html.document import document
assert repulsive.__file__.startswith(sys.argv[1]) and callable(repel)
assert "<style>" in document("title", "body")
assert run(["--version"]) == 0
assert run(["ls", "--recipes"]) == 0
train = next(extra for extra in collect().extras if extra.name == "train")
assert train.includes == ("cli",), train
"""


def test_the_wheel_runs_from_where_it_is_unpacked(built, tmp_path):
    with zipfile.ZipFile(the_wheel(built)) as wheel:
        wheel.extractall(tmp_path / "unpacked")
    done = ran(sys.executable, "-c", UNPACKED, tmp_path / "unpacked", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"repulsive {repulsive.__version__}\n")
    assert "yelp/svgd " in done.stdout and "lm/" in done.stdout


def test_the_sdist_holds_what_its_tests_need(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    for folder in FOLDERS:
        here = (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
        assert {path.relative_to(ROOT).as_posix() for path in here} <= names
    assert set(BESIDE) <= names
    for folder in ("results", ".github"):  # documents link to results
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert not [name for name in names if name.endswith((".pyc", ".safetensors", ".npy"))]


def test_the_version_has_one_place_and_the_changelog_knows_it():
    written = (SOURCE / "repulsive" / "_version.py").read_text()
    assert f'__version__ = "{repulsive.__version__}"' in written
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'attr = "repulsive._version.__version__"' in project
    top = re.search(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    release, _, development = repulsive.__version__.partition(".dev")
    if top[1] == "Unreleased":
        assert development, "a released version has an entry of its own"
        assert top[2] in (None, release)
    else:
        assert top[1] == repulsive.__version__


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_every_direct_dependency_of_every_extra():
    needed = read_requirements()
    groups = (needed.required, *needed.extras.values())
    direct = {normalised(line.name): line for group in groups for line in group if line.name != "repulsive"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines) and all(pins.values())
    assert set(pins) - {"triton"} == set(direct) - {"triton"}  # Triton is for Linux only
    assert len(direct) > 20 and "torch" in direct and "mkdocs-material" in direct and "pycocoevalcap" in direct
    for name, requirement in direct.items():
        assert numbers(pins[name]) >= numbers(requirement.oldest), name


def test_the_lock_file_has_the_same_versions_with_hashes():
    text = "\n".join(line for line in (ROOT / "lock.txt").read_text().splitlines() if not line.startswith("#"))
    packages = re.findall(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+)", text, re.M)
    locked = {normalised(name): version for name, version, _ in packages}
    assert len(re.findall(r"^\S", text, re.M)) == len(packages) == len(locked)  # every line was understood
    assert "torch" not in locked and not any(name.startswith(("nvidia-", "cuda-")) for name in locked)
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert {name: version for name, version in locked.items() if name in pins and pins[name] != version} == {}
    assert {"transformers", "pytest", "ruff", "accelerate", "mkdocs-material"} <= set(locked)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@pytest.mark.slow
def test_it_installs_into_an_empty_environment_and_runs_the_demo_there(built, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    programs, wheel = tmp_path / "venv" / "bin", the_wheel(built)

    def install(extra: str) -> None:
        done = ran(programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}{extra}")
        assert done.returncode == 0, done.stderr[-2000:]

    def said(*words: str) -> tuple[int, str, list[str]]:
        """Exit code, output, and what the command itself had to say."""
        done = ran(programs / "repulsive", *words, cwd=tmp_path)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, [x for x in done.stderr.splitlines() if x.startswith("repulsive: ")]

    install("")
    code, out, complaints = said()
    assert code == 2 and out == ""
    assert complaints == [
        "repulsive: the command line needs typer and rich; install it with: python -m pip install 'repulsive[cli]'"
    ]
    # torch itself warns that there is no NumPy; that `import repulsive` works with torch alone is what counts.
    script = "import repulsive, sys; print(repulsive.__version__, repulsive.__file__); assert 'rich' not in sys.modules"
    done = ran(programs / "python", "-c", script, cwd=tmp_path)
    assert done.stdout.split() == [repulsive.__version__, done.stdout.split()[1]], done.stderr
    assert done.stdout.split()[1].startswith(str(tmp_path / "venv"))

    install("[cli]")
    assert said("--version") == (0, f"repulsive {repulsive.__version__}\n", [])
    code, _, complaints = said("demo", "--table", *SMALLEST)
    assert code == 2 and len(complaints) == 1 and "pip install 'repulsive[train]'" in complaints[0]

    install("[demo]")
    code, out, complaints = said("demo", "--seeds", "1", "--steps", "3")
    assert (code, complaints) == (0, [])
    assert "page: demo/report.html" in out and out.splitlines()[-1].endswith("one seed has no interval.")
    assert "</html>" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")

    install("[train]")
    code, out, complaints = said("demo", "--table", *SMALLEST)
    assert (code, complaints) == (0, [])
    assert re.search(r"^SPOS +1  ", out, re.M) and "report: demo/table/report.html" in out, out
    page = (tmp_path / "demo" / "table" / "report.html").read_text(encoding="utf-8")
    assert "<style>" in page and "<script>" in page and "</html>" in page
    assert said("ls")[0] == 0

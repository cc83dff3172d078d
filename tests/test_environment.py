"""`repulsive doctor`: versions, extras and what is missing, also without torch."""

import json
import re
import subprocess
import sys
from importlib import metadata

import pytest

from repulsive import extras
from repulsive._version import __version__
from repulsive.cli import main
from repulsive.environment import collect, requirements
from repulsive.environment.describe import describe
from repulsive.environment.requirements import Requirement, check_package, parse_requirement, resolve


@pytest.fixture
def installed(monkeypatch):
    """Replace the versions of installed packages: {name: version, or None for a missing package}."""

    def replace(changes: dict[str, str | None]) -> None:
        real = metadata.version

        def version(name: str) -> str:
            if name in changes and changes[name] is None:
                raise metadata.PackageNotFoundError(name)
            return changes[name] or "" if name in changes else real(name)

        monkeypatch.setattr(metadata, "version", version)

    return replace


def doctor(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exited:
        main(["doctor", *words])
    out, err = capsys.readouterr()
    assert err == ""
    return exited.value.code, out


def test_doctor_prints_versions_and_every_extra(capsys, monkeypatch):
    monkeypatch.setenv("REPULSIVE_DATA", "some/folder")
    code, out = doctor(capsys)
    assert code == 0
    assert f"repulsive       {__version__} in " in out
    assert f"torch           {metadata.version('torch')}" in out
    assert "  REPULSIVE_DATA=some/folder\n" in out
    assert f"\n  cli             typer {metadata.version('typer')}, rich {metadata.version('rich')}\n" in out
    names = list(requirements.read_requirements().extras)
    assert len(names) > 10 and all(f"\n  {name} " in out for name in names)


def test_json_has_the_facts_of_the_text(capsys):
    code, out = doctor(capsys, "--json")
    facts = json.loads(out)
    assert (code, facts["version"], facts["problems"]) == (0, __version__, [])
    assert facts["required"] == [{"name": "torch", "version": metadata.version("torch"), "problem": ""}]
    assert {"cli", "train", "dev"} <= {extra["name"] for extra in facts["extras"]}


def test_a_missing_package_is_named_in_every_extra_that_needs_it(installed):
    installed({"rich": None, "optuna": "3.6.1"})
    environment = collect.collect()
    extras = {extra.name: extra for extra in environment.extras}
    assert [(package.name, package.problem) for package in extras["cli"].missing] == [("rich", "missing")]
    train = [(package.name, package.problem) for package in extras["train"].missing]
    assert sorted(train) == [("optuna", "too old, needs 4 or newer"), ("rich", "missing")]
    assert extras["train"].install == "python -m pip install -e '.[train]' -c constraints.txt"
    assert extras["lightning"].missing == () and extras["lightning"].install == ""
    text = describe(environment)
    assert "needs optuna (too old, needs 4 or newer), rich (missing)" in " ".join(text.split())
    assert max(map(len, text.partition("\nextras\n")[2].partition("\n\n")[0].splitlines())) <= 80
    command, names = text.partition("to install what is missing\n")[2].splitlines()[:2]
    assert command == "  command  python -m pip install -e '.[NAME,...]' -c constraints.txt"
    assert {"cli", "train"} <= set(names.removeprefix("  names    ").replace(",", "").split())
    assert environment.problems == []  # an extra is optional


def test_an_installed_wheel_gets_another_command(monkeypatch):
    monkeypatch.setattr(extras, "_CHECKOUT", extras._CHECKOUT / "tests")
    assert extras.install_command("train") == "python -m pip install 'repulsive[train]'"


def test_every_message_takes_its_command_from_one_function():
    """In a checkout, `pip install 'repulsive[...]'` would not find this package."""
    texts = [path.read_text(encoding="utf-8") for path in (extras._CHECKOUT / "src").rglob("*.py")]
    assert any("install_command(" in text for text in texts)
    assert not any(re.search(r"pip install .?['\"]repulsive", text) for text in texts)


def test_metadata_and_project_file_list_the_same_extras(monkeypatch):
    project = requirements.read_requirements()
    lines = [f"{r.name}>={r.oldest}" for r in project.required]
    for extra, needed in project.extras.items():
        for r in needed:
            words = f"[{','.join(r.extras)}]" if r.extras else ""
            bound = f">={r.oldest}" if r.oldest else ""
            lines.append(f'{r.name}{words}{bound}; extra == "{extra}"')
    monkeypatch.setattr(extras, "_CHECKOUT", extras._CHECKOUT / "tests")
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert requirements.read_requirements() == project


def test_without_metadata_torch_is_still_required(monkeypatch):
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "_CHECKOUT", extras._CHECKOUT / "tests")
    monkeypatch.setattr(metadata, "requires", absent)
    environment = collect.collect()
    assert [package.name for package in environment.required] == ["torch"]
    assert environment.extras == () and "the package has no metadata" in describe(environment)


def test_a_required_package_that_is_too_old_is_a_problem(installed, capsys):
    installed({"torch": "2.5.1"})
    code, out = doctor(capsys)
    assert code == 1
    assert out.endswith("\nproblems\n  torch: too old, needs 2.6 or newer\n")


MISSING = """
import sys
from importlib import metadata
real = metadata.version
def version(name):
    if name in {hidden!r}:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
sys.modules["torch"] = None
from repulsive.cli import main
main({words!r})
"""


@pytest.mark.parametrize(
    ("hidden", "problem"),
    [(["torch", "numpy"], "torch: missing"), ([], "torch: cannot be imported: ModuleNotFoundError: import of torch")],
    ids=["missing", "broken"],
)
def test_doctor_works_without_torch(hidden, problem):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        code = MISSING.format(hidden=hidden, words=["doctor", *words])
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    text, table = run(), run("--json")
    assert (text.returncode, text.stderr) == (1, "")
    assert f"problems\n  {problem}" in text.stdout and "CUDA  " not in text.stdout
    assert (table.returncode, table.stderr) == (1, "")
    facts = json.loads(table.stdout)
    assert facts["torch"]["version"] is None and facts["problems"][0].startswith(problem)
    train = next(extra for extra in facts["extras"] if extra["name"] == "train")
    assert [package["name"] for package in train["missing"]] == [name for name in hidden if name == "numpy"]


@pytest.mark.parametrize(
    ("setting", "used", "reason"),
    [
        ("", False, "no CUDA device"),
        ("eager", False, "REPULSIVE_KERNELS=eager"),
        ("other", False, "REPULSIVE_KERNELS='other': choose eager or triton"),
    ],
)
def test_the_reason_for_or_against_triton(monkeypatch, setting, used, reason):
    monkeypatch.setenv("REPULSIVE_KERNELS", setting)
    result = collect._triton(collect.Torch("2.13.0"))
    assert (result.used, result.reason) == (used, reason)


def test_triton_is_used_on_a_cuda_device(monkeypatch):
    monkeypatch.delenv("REPULSIVE_KERNELS", raising=False)
    pytest.importorskip("triton")
    result = collect._triton(collect.Torch("2.13.0", devices=("cuda:0 any",)))
    assert (result.used, result.reason) == (True, "a CUDA device")


def test_requirements_are_parsed():
    assert parse_requirement("a_b>=1.2") == (Requirement("a_b", (), "1.2"), "")
    assert parse_requirement("x[p, q] >=2,<3 ; extra == 'train'") == (Requirement("x", ("p", "q"), "2"), "train")
    assert parse_requirement('t>=3; sys_platform == "none" and extra == "fused"') is None
    assert parse_requirement(f"t; sys_platform == '{sys.platform}'") == (Requirement("t"), "")
    with pytest.raises(ValueError, match="cannot parse"):
        parse_requirement("?")


def test_extras_that_include_each_other_are_resolved_once():
    extras = {
        "a": [Requirement("repulsive", ("b",)), Requirement("x")],
        "b": [Requirement("repulsive", ("a",)), Requirement("y"), Requirement("x")],
    }
    assert [requirement.name for requirement in resolve("a", extras)] == ["x", "y"]


@pytest.mark.parametrize(
    ("version", "oldest", "problem"),
    [("2.13.0+cpu", "2.6", ""), ("2.6.0rc1", "2.6", ""), ("2.5", "2.6", "too old, needs 2.6 or newer"), ("9", "", "")],
)
def test_versions_are_compared_by_number(installed, version, oldest, problem):
    installed({"anything": version})
    assert check_package(Requirement("anything", (), oldest)).problem == problem


def test_triton_of_nightly_builds_counts(installed):
    installed({"triton": None, "pytorch-triton": "3.9.0"})
    assert check_package(Requirement("triton", (), "3.2")).version == "3.9.0"


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


@pytest.fixture
def broken_torchvision(tmp_path, monkeypatch):
    """A torchvision that was built for another torch: its import fails."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(BROKEN)
    about = tmp_path / "torchvision-0.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    return tmp_path


def test_a_torchvision_for_another_torch_is_a_problem(broken_torchvision, capsys):
    code, out = doctor(capsys)
    assert code == 1
    assert "  torchvision: 0.9 cannot be imported with torch " in out
    assert "(RuntimeError: operator torchvision::nms does not exist); install the version for this torch" in out


@pytest.mark.parametrize("words", [("bench", "--model", "gpt2"), ("heads", "FOLDER")])
def test_commands_name_a_torchvision_for_another_torch(words, broken_torchvision, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    path = f"import sys; sys.path.insert(0, {str(broken_torchvision)!r})"
    code = f"{path}; from repulsive.cli import main; main(sys.argv[1:])"
    given = [str(tmp_path) if word == "FOLDER" else word for word in words]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        pytest.skip("this version of transformers does not import torchvision for a language model")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "RuntimeError: operator torchvision::nms does not exist" in done.stderr and done.stderr.count("\n") == 1

"""Files for a release agree with the package: versions, workflows, templates."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from repulsive._version import __version__

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.y*ml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
PINNED = re.compile(r"[\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def load(path: Path) -> dict:
    """Read YAML; its key `on` stays a word."""
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def test_the_citation_has_the_version():
    assert load(ROOT / "CITATION.cff")["version"] == __version__


def test_the_tests_run_on_every_supported_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    job = load(GITHUB / "workflows" / "tests.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == listed
    assert project["requires-python"] == f">={listed[0]}"
    assert "make test" in [step.get("run") for step in job["steps"]]


def test_the_oldest_torch_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (line.removeprefix("torch>=") for line in project["dependencies"])
    steps = load(GITHUB / "workflows" / "tests.yml")["jobs"]["oldest"]["steps"]
    assert any(f"'torch=={oldest}.0'" in step.get("run", "") for step in steps)


def test_workflow_files_are_linted():
    jobs = load(GITHUB / "workflows" / "tests.yml")["jobs"]
    assert jobs["workflows"]["steps"][-1]["run"] == "make workflows"
    commands = subprocess.run(["make", "-n", "workflows"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "node .ci/lint_workflows.cjs .github/workflows/*.yml" in commands


def test_a_tag_publishes_without_a_stored_password():
    workflow = load(GITHUB / "workflows" / "publish.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["build"]["permissions"] == {
        "contents": "read"
    }
    assert "secrets." not in (GITHUB / "workflows" / "publish.yml").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_permissions_and_safe_steps(path):
    workflow = load(path)
    assert set(workflow["permissions"] or {}) <= {"contents"}
    for job in workflow["jobs"].values():
        assert int(job["timeout-minutes"]) > 0
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "${{" not in step.get("run", "")  # an expression in a script can inject code


def actions_of(text: str) -> list[str]:
    """List every action that a workflow file uses, with the comment behind it."""
    return [line.strip() for line in re.findall(r"""^[\s-]*["']?uses["']?\s*:(.*)$""", text, re.M)]


def unpinned_actions(text: str) -> list[str]:
    """List the actions that are not pinned to a full commit hash with a version comment."""
    return [action for action in actions_of(text) if not PINNED.fullmatch(action)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commit_hashes(path):
    text = path.read_text(encoding="utf-8")
    jobs = load(path)["jobs"].values()
    count = sum("uses" in part for job in jobs for part in (job, *job.get("steps", ())))
    assert len(actions_of(text)) == count > 0  # no action escapes the regular expression
    assert not unpinned_actions(text), "pin each action as owner/name@<40 hex digits> # v1.2.3; see CONTRIBUTING.md"


@pytest.mark.parametrize(
    "action",
    [
        "actions/checkout@v4",
        "actions/checkout@v4 # v4.2.2",
        "actions/checkout@main",
        f"actions/checkout@{'a1' * 20}",
        f"actions/checkout@{'a1' * 20} # v4",
        f"actions/checkout@{'a1' * 19} # v4.2.2",
        f"actions/checkout@{'a1' * 32} # v4.2.2",
        f"actions/checkout@{'A1' * 20} # v4.2.2",
        f'"actions/checkout@{"a1" * 20}" # v4.2.2',
        "docker://alpine:3.20",
        "./.github/actions/local",
    ],
)
def test_an_action_without_hash_or_version_is_reported(action):
    pinned = f"actions/checkout@{'a1' * 20} # v4.2.2"
    text = f"steps:\n  - uses: {pinned}\n  - name: x\n    uses: {action}\n  - 'uses': {pinned}\n"
    assert unpinned_actions(text) == [action]


def test_an_action_has_one_version_in_all_workflows():
    actions = {action for path in WORKFLOWS for action in actions_of(path.read_text(encoding="utf-8"))}
    assert len(actions) == len({action.partition("@")[0] for action in actions})


def test_dependabot_updates_the_actions_every_week():
    (updates,) = load(GITHUB / "dependabot.yml")["updates"]
    assert updates["package-ecosystem"] == "github-actions" and updates["directory"] == "/"
    assert updates["schedule"] == {"interval": "weekly"}


@pytest.mark.parametrize("path", [*WORKFLOWS, *FORMS, ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.name)
def test_no_host_names(path):
    assert "://" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.name)
def test_issue_forms_are_complete(path):
    form = load(path)
    assert form["name"] and form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names) and all(field["attributes"]["label"] for field in form["body"])


def test_a_bug_report_asks_for_the_output_of_doctor():
    assert "repulsive doctor" in (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text()


def test_pre_commit_runs_the_pinned_ruff():
    (pin,) = re.findall(r"^ruff==.+$", (ROOT / "constraints.txt").read_text(), re.M)
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["entry"].split()[:2] for hook in repository["hooks"]] == [["ruff", "check"], ["ruff", "format"]]
    assert all(hook["additional_dependencies"] == [pin] for hook in repository["hooks"])

"""Every snippet, command and link in the documents is true today.

Python blocks of a file run in order in one namespace. A block after `<!-- no-test: reason -->` does not run.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_UNTESTED = 3

FENCE = re.compile(
    r"(?:<!--\s*no-test:(?P<reason>.*?)-->\s*\n)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```", re.M | re.S
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:|#)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, text, first line in the file, and why it does not run (None: it does)."""

    language: str
    text: str
    line: int
    untested: str | None


def blocks(markdown: str, *languages: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(markdown):
        if match["language"] in languages:
            line = markdown.count("\n", 0, match.start("text")) + 1
            found.append(Block(match["language"], match["text"], line, match["reason"]))
    return found


def python_blocks(path: Path) -> list[Block]:
    return blocks(path.read_text(), "python", "py")


def commands(path: Path) -> list[list[str]]:
    """The words of every command in the file's shell blocks; in a console block only lines that open with `$`."""
    found = []
    for block in blocks(path.read_text(), "bash", "sh", "console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language == "console" and not line.startswith("$ "):
                continue
            for command in line.removeprefix("$ ").split("&&"):
                words = shlex.split(command, comments=True)
                if words:
                    found.append(words)
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def wrong_part(words: list[str]) -> str | None:
    """What a command names that does not exist; None if all is well."""
    program, rest = words[0], words[1:]
    if program == "make":
        named = [word for word in rest if not word.startswith("-") and "=" not in word]
        return next((f"make target {name}" for name in named if name not in make_targets()), None)
    if program == "repulsive":
        from repulsive.cli.app import verbs

        known = {*verbs(), "--version", "--help"}
        return None if rest and rest[0] in known else f"verb {rest[:1]}"
    if program.removesuffix("3") == "python" and rest and rest[0].endswith(".py"):
        return None if (ROOT / rest[0]).is_file() else f"file {rest[0]}"
    return None


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if python_blocks(p)], ids=name)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__readme__"}
    for block in python_blocks(path):
        if block.untested is None:
            # Empty lines in front give a traceback the line numbers of the document.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)


def test_the_readme_has_snippets_that_run():
    assert sum(block.untested is None for block in python_blocks(ROOT / "README.md")) >= 4


def test_few_blocks_are_left_untested_and_each_says_why():
    untested = [block for path in DOCUMENTS for block in python_blocks(path) if block.untested is not None]
    assert all(block.untested.strip() for block in untested)
    assert len(untested) <= MOST_UNTESTED


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_name_what_exists(path):
    assert {" ".join(words): wrong for words in commands(path) if (wrong := wrong_part(words))} == {}


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(path):
    assert [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()] == []


def test_the_reader_of_documents_sees_what_it_should(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n<!-- no-test: needs two machines -->\n```python\nb = 2\n```\n"
        "```console\n$ make nothing\nmake believe\n$ repulsive haeds x  # typo\n```\n"
    )
    assert [(b.text, b.line, b.untested) for b in python_blocks(page)] == [
        ("a = 1\n", 2, None),
        ("b = 2\n", 7, " needs two machines "),
    ]
    assert [wrong_part(words) for words in commands(page)] == ["make target nothing", "verb ['haeds']"]
    assert wrong_part(["make", "test"]) is None
    assert wrong_part(["python", "examples/none.py"]) == "file examples/none.py"

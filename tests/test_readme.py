"""Every snippet, command and link in the documents is true today.

Python blocks of a file run in order in one namespace. A block after `<!-- no-test: reason -->` does not run. Commands
of `repulsive` are parsed by the program itself, without being run; those that need nothing and take a moment are run.
"""

import itertools
import re
import shlex
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_UNTESTED = 3

OPTIONAL = ("accelerate", "lightning", "torch_geometric", "transformers")  # `make install` has them all
SHELL = ("|", "<", ">", ">>")  # words for the shell, not for the program
CHEAP = (["ls"], ["--version"])  # commands that are run

FENCE = re.compile(
    r"(?:<!--\s*no-test:(?P<reason>.*?)-->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    re.M | re.S,
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
RECORDS = [ROOT / "CHANGELOG.md", *sorted((ROOT / "studies").rglob("*.md")), *sorted((ROOT / "results").rglob("*.md"))]


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
            found.append(Block(match["language"], textwrap.dedent(match["text"]), line, match["reason"]))
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
                words = list(itertools.takewhile(lambda word: word not in SHELL, shlex.split(command, comments=True)))
                if words:
                    found.append(words)
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def arguments_of_repulsive(words: list[str]) -> list[str] | None:
    """What a command gives to `repulsive`, started as such or as a module by python, torchrun or accelerate."""
    if words[0] == "repulsive":
        return words[1:]
    for i, pair in enumerate(itertools.pairwise(words)):
        if pair == ("-m", "repulsive"):
            return words[i + 2 :]
    return None


def refused(arguments: list[str]) -> str | None:
    """What the command line has against these words, short of doing what they say; None if nothing."""
    import typer

    from repulsive.cli.app import app
    from repulsive.errors import ConfigError
    from repulsive.lab.engine import built_in

    if arguments == ["--version"]:
        return None
    command, context, rest = typer.main.get_command(app), None, list(arguments)
    try:
        while hasattr(command, "commands"):  # a verb may have verbs of its own
            if rest[:1] == ["--help"]:
                return None
            context = command.make_context(command.name or "", [], parent=context, resilient_parsing=True)
            context.resilient_parsing = False
            _, command, rest = command.resolve_command(context, rest)
        parsed = command.make_context(command.name, rest, parent=context)
        for recipe in parsed.params.get("recipes", ()) if command.name in ("train", "sweep") else ():
            if not recipe.endswith(".toml"):
                built_in.find(recipe)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # Click's own, whichever copy of it Typer has
            raise
        return error.format_message()
    return None


def wrong_part(words: list[str]) -> str | None:
    """What a command names that does not exist; None if all is well."""
    program, rest = words[0], words[1:]
    arguments = arguments_of_repulsive(words)
    if arguments is not None:
        return refused(arguments)
    if program == "make":
        named = [word for word in rest if not word.startswith("-") and "=" not in word]
        return next((f"make target {name}" for name in named if name not in make_targets()), None)
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
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            try:
                exec(code, namespace)
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise
                pytest.skip(f"line {block.line} and what follows need {error.name}")


def test_the_readme_shows_what_is_printed(capsys):
    readme = ROOT / "README.md"
    line, table = [block.text for block in blocks(readme.read_text(), "text")]
    namespace: dict[str, object] = {"__name__": "__readme__"}
    for block in python_blocks(readme)[:2]:
        exec(block.text, namespace)
    printed = capsys.readouterr()
    assert printed.err == line
    number = re.compile(r"[+-]\d\.\d{3}")
    assert number.sub("", printed.out) == number.sub("", table)
    shown, measured = ([float(word) for word in number.findall(text)] for text in (table, printed.out))
    assert measured == pytest.approx(shown, abs=0.005)  # processors round differently


def test_the_readme_has_snippets_that_run():
    assert sum(block.untested is None for block in python_blocks(ROOT / "README.md")) >= 3


def test_few_blocks_are_left_untested_and_each_says_why():
    untested = [block for path in DOCUMENTS for block in python_blocks(path) if block.untested is not None]
    assert all(block.untested.strip() for block in untested)
    assert len(untested) <= MOST_UNTESTED


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_name_what_exists(path):
    assert {" ".join(words): wrong for words in commands(path) if (wrong := wrong_part(words))} == {}


def test_cheap_commands_run(capfd):
    from repulsive.cli.app import run

    shown = [arguments_of_repulsive(words) for path in DOCUMENTS for words in commands(path)]
    for arguments in CHEAP:
        assert arguments in shown
        assert run(arguments) == 0
        assert capfd.readouterr().out.strip()


def anchors(markdown: str) -> set[str]:
    """The anchors of headings, as GitHub and MkDocs make them, and of elements with an id."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", FENCE.sub("", markdown))
    headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.+)$", text, re.M)]
    return {heading.strip().replace(" ", "-") for heading in headings} | set(re.findall(r'id="([^"]+)"', text))


def dead_links(path: Path) -> list[str]:
    """Links of a page to files that do not exist, and to headings that a page does not have."""
    dead = []
    for file, anchor in LINK.findall(FENCE.sub("", path.read_text())):
        target = path.parent / file if file else path
        is_page = target.suffix == ".md" and target.is_file()
        # MkDocs makes pages of docs/api; test_site.py checks their anchors.
        if not target.exists() or (
            anchor and is_page and "api" not in target.parts and anchor not in anchors(target.read_text())
        ):
            dead.append(f"{file}#{anchor}" if anchor else file)
    return dead


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    assert dead_links(path) == []


def test_links_of_results_and_studies_lead_somewhere():
    assert len(RECORDS) > 50
    assert {name(path): dead for path in RECORDS if (dead := dead_links(path))} == {}


def test_dead_links_and_anchors_are_found(tmp_path):
    (tmp_path / "a.md").write_text(
        "# One two: `x`\n[y](b.md) [z](#one-two-x) [w](#one) [v](a.md#two)\n```text\n[u](c)\n```\n"
    )
    assert dead_links(tmp_path / "a.md") == ["b.md", "#one", "a.md#two"]


def test_abbreviations_are_in_the_glossary():
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    defined = set(re.findall(r"\b[A-Z]{2,}\b|\bDist\b", " ".join(re.findall(r"^\| ([^|]+) \|", glossary, re.M))))
    assert {"SVGD", "SPOS", "SGLD", "MA", "NLL", "ECE", "OE", "AUROC", "CKA", "QK", "OV", "BLEU", "Dist"} <= defined
    for start in ("README.md", "docs/index.md"):
        assert "glossary.md" in (ROOT / start).read_text()
    assert "Stein variational gradient" in " ".join((ROOT / "README.md").read_text().split())


def test_the_guide_lists_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = (ROOT / "docs" / "guide.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    listed = {word for row in re.findall(r"^\| (`[^|]+) \|", section, re.M) for word in re.findall(r"`(\w+)`", row)}
    assert listed == set(extras)


def test_the_reader_of_documents_sees_what_it_should(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n<!-- no-test: needs two machines -->\n```python\nb = 2\n```\n"
        "```console\n$ make nothing\nmake believe\n$ repulsive haeds x  # typo\n```\n"
        "1. A list:\n\n    ```python\n    if True:\n        c = 3\n    ```\n"
    )
    assert [(b.text, b.line, b.untested) for b in python_blocks(page)] == [
        ("a = 1\n", 2, None),
        ("b = 2\n", 7, " needs two machines "),
        ("if True:\n    c = 3\n", 17, None),
    ]
    assert [wrong_part(words) for words in commands(page)] == ["make target nothing", refused(["haeds"])]
    assert wrong_part(["make", "test"]) is None
    assert wrong_part(["python", "examples/none.py"]) == "file examples/none.py"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("repulsive train yelp/svgd --set method.ratio=0.1 --seeds 3", None),
        ("torchrun --nproc-per-node 2 -m repulsive train yelp/svgd", None),
        ("repulsive judge --help", None),
        ("repulsive haeds", "No such command"),
        ("repulsive train yelp/svdg", "did you mean"),
        ("repulsive train yelp/svgd --sed 3", "No such option"),
        ("repulsive train yelp/svgd --seed three", "integer"),
        ("python -m repulsive train", "Missing argument"),
    ],
)
def test_the_program_itself_parses_commands(command, wrong):
    found = wrong_part(shlex.split(command))
    assert found is None if wrong is None else wrong in found

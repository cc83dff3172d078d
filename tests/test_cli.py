"""The `repulsive` command: output, and errors of the user (one line on stderr, exit code 2)."""

import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from repulsive._version import __version__
from repulsive.cli import main
from repulsive.cli.output import warnings_as_lines
from repulsive.errors import ConfigError
from repulsive.lab.engine.stop_signals import Stopped

BLOCKS = """
import torch
from torch import nn

def small():
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.contents = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.queries, self.keys, self.contents))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

def tokens():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))

class Shelf:
    model = small()

def sized(width):
    return nn.Linear(width, width)

def broken():
    raise RuntimeError("the weights\\nare elsewhere")

def number():
    return 3

SIZE = 3
"""


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def repulsive(tmp_path, monkeypatch, capsys):
    """Run the command in a folder that contains only the modules of this test."""
    (tmp_path / "blocks_of_test_cli.py").write_text(BLOCKS)
    (tmp_path / "needs_of_test_cli.py").write_text("import a_package_nobody_has")
    (tmp_path / "syntax_of_test_cli.py").write_text("def (:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> Outcome:
        with pytest.raises(SystemExit) as exited:
            main(words)
        for name in [n for n in sys.modules if n.endswith("_of_test_cli")]:
            del sys.modules[name]
        out, err = capsys.readouterr()
        return Outcome(exited.value.code, out, err)

    return run


def one_line(outcome: Outcome) -> str:
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("repulsive: ")
    return outcome.err


def test_version(repulsive):
    outcome = repulsive("--version")
    assert (outcome.code, outcome.out) == (0, f"repulsive {__version__}\n")


def test_help_and_version_do_not_load_torch():
    code = (
        "import sys\n"
        "from repulsive.cli import main\n"
        "from repulsive.cli.app import verbs\n"
        "for words in (['--version'], ['--help'], *([verb, '--help'] for verb in verbs())):\n"
        "    try:\n"
        "        main(words)\n"
        "    except SystemExit as left:\n"
        "        assert left.code == 0, words\n"
        "    assert 'torch' not in sys.modules, words\n"
        "    assert 'numpy' not in sys.modules, words\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.count("Usage: repulsive") > 10


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (None, 0),
        (ConfigError("no such recipe"), 2),
        (KeyboardInterrupt(), 130),
        (Stopped("stopped at step 8", signal.SIGINT), 130),
        (Stopped("stopped at step 8", signal.SIGTERM), 143),
        (Stopped("stopped at step 8", signal.SIGUSR1), 138),
    ],
    ids=["success", "user error", "Ctrl-C", "Ctrl-C in training", "SIGTERM in training", "SIGUSR1 in training"],
)
def test_exit_codes(repulsive, monkeypatch, outcome, code):
    monkeypatch.setattr("repulsive.environment.collect.collect", raising(outcome))
    monkeypatch.setattr("repulsive.environment.describe.describe", lambda environment: "fine")
    ended = repulsive("doctor")
    assert ended.code == code
    assert ended.err.count("\n") == (code != 0)


def test_an_unexpected_error_is_not_hidden(repulsive, monkeypatch):
    monkeypatch.setattr("repulsive.environment.collect.collect", raising(ZeroDivisionError("a defect")))
    with pytest.raises(ZeroDivisionError):  # Python prints the traceback and exits with 1
        main(["doctor"])


def raising(outcome: BaseException | None):
    class Healthy:
        problems = ()

    def collect() -> Healthy:
        if outcome is not None:
            raise outcome
        return Healthy()

    return collect


def test_the_documented_exit_codes_are_these():
    page = Path(__file__).resolve().parents[1] / "docs" / "api" / "cli.md"
    assert re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), re.M) == ["0", "1", "2", "130", "138", "143"]


def complete(words: str) -> list[str]:
    """The suggestions for the last word of a command line, as bash asks for them."""
    variables = {
        "_REPULSIVE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    code = "import atexit, sys\nfrom repulsive.cli import main\n"
    code += "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\nmain([])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert (done.returncode, done.stderr) == (0, "False\n")
    return done.stdout.split()


def test_a_shell_completes_verbs_and_options_without_torch():
    assert complete("repulsive do") == ["doctor"]
    assert complete("repulsive doctor --j") == ["--json"]
    assert complete("repulsive judge ") == ["make", "tally"]


def test_help_texts_have_one_line_per_paragraph():
    """Typer keeps line breaks inside a paragraph, which look ragged at another width."""
    import typer

    from repulsive.cli.app import app

    group = typer.main.get_command(app)
    verbs = [*group.commands.values(), *(each for verb in group.commands.values() for each in _commands(verb))]
    assert len(verbs) > 20
    assert [verb.name for verb in verbs if any("\n" in text for text in (verb.help or "").strip().split("\n\n"))] == []


def _commands(verb):
    return getattr(verb, "commands", {}).values()


def test_no_verb_prints_help(repulsive):
    outcome = repulsive()
    assert outcome.code == 0
    assert "heads" in outcome.out


@pytest.mark.parametrize("name", ["small", "Shelf.model"])
def test_heads_of_a_function_and_of_an_object(repulsive, name):
    outcome = repulsive("heads", f"blocks_of_test_cli:{name}")
    assert (outcome.code, outcome.err) == (0, "")
    assert "layers.0.self_attn" in outcome.out
    assert "layers.1.self_attn" in outcome.out


def test_an_example_finds_the_heads_of_an_unknown_class(repulsive):
    assert "--example on the command line" in one_line(repulsive("heads", "blocks_of_test_cli:Own"))
    outcome = repulsive("heads", "blocks_of_test_cli:Own", "--example", "blocks_of_test_cli:tokens")
    assert (outcome.code, outcome.err) == (0, "")
    assert "queries.weight" in outcome.out and "rows of each head: proved on the example." in outcome.out


@pytest.mark.parametrize("end", ["", "/config.json"])
def test_heads_of_a_model_folder_without_weights(repulsive, tmp_path, end):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 20}
    transformers.BertConfig(num_hidden_layers=2, **sizes).save_pretrained(tmp_path / "tiny")
    outcome = repulsive("heads", f"tiny{end}")
    assert outcome.code == 0
    assert "encoder.layer.1.attention.self" in outcome.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["haeds"], "heads"),
        (["heads"], "target"),
        (["heads", "a", "b"], "b"),
        (["ls", "."], "`repulsive ls --out .` the runs in a folder"),
        (["--verbose"], "--verbose"),
        (["heads", "nowhere"], "no folder 'nowhere'"),
        (["heads", "./nowhere/deeper"], "no folder './nowhere/deeper'"),
        (["heads", "."], "has no config.json"),
        (["heads", ":small"], "package.module:name"),
        (["heads", "blocks_of_test_cli:"], "package.module:name"),
        (["heads", "block_of_test_cli:small"], "did you mean 'blocks_of_test_cli'?"),
        (["heads", "blocks_of_test_cli:smal"], "did you mean 'small'?"),
        (["heads", "blocks_of_test_cli:Shelf.modle"], "did you mean 'model'?"),
        (["heads", "blocks_of_test_cli.deeper:small"], "no module"),
        (["heads", "needs_of_test_cli:small"], "needs 'a_package_nobody_has'"),
        (["heads", "syntax_of_test_cli:small"], "SyntaxError"),
        (["heads", "blocks_of_test_cli:SIZE"], "is an object of type int"),
        (["heads", "blocks_of_test_cli:number"], "returned an object of type int"),
        (["heads", "blocks_of_test_cli:sized"], "'width'"),
        (["heads", "blocks_of_test_cli:broken"], "RuntimeError: the weights"),
        (["heads", "blocks_of_test_cli:Plain"], "head"),
        (["demo", "--table", "--data", "news"], "choose reviews or movie-reviews"),
        (["demo", "--data", "reviews"], "apply to --table only"),
        (["demo", "--set", "training.epochs=1"], "apply to --table only"),
        (["demo", "--table", "--steps", "3"], "do not apply to --table"),
        (["demo", "--out", "blocks_of_test_cli.py"], "--out 'blocks_of_test_cli.py': cannot be created"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_user_errors_print_one_line(repulsive, words, expected):
    assert expected in one_line(repulsive(*words))


@pytest.mark.parametrize(
    ("words", "command"),
    [(["bench", "--nope"], "repulsive bench"), (["train"], "repulsive train"), (["nope"], "repulsive")],
)
def test_a_usage_error_names_the_help_of_its_command(repulsive, words, command):
    assert repulsive(*words).err.endswith(f"(see: {command} --help)\n")


def test_a_misspelled_folder_name_gets_a_suggestion(repulsive, tmp_path):
    (tmp_path / "electra-small").mkdir()
    assert "did you mean 'electra-small'?" in one_line(repulsive("heads", "electra-smal"))


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no-such-architecture"}'])
def test_an_invalid_config_is_an_error(repulsive, tmp_path, text):
    pytest.importorskip("transformers")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(text)
    assert "cannot read" in one_line(repulsive("heads", "tiny"))


def test_an_error_of_several_lines_is_printed_with_its_reason(repulsive, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "bert", "num_attention_heads": "four"}')
    assert "'num_attention_heads' expected int, got str" in one_line(repulsive("heads", "tiny"))


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_the_cli_extra_the_error_says_what_to_install(tmp_path, absent):
    code = (
        "import importlib.util as util, sys\n"
        "real = util.find_spec\n"
        f"util.find_spec = lambda name, package=None: None if name == {absent!r} else real(name, package)\n"
        "from repulsive.cli import main\n"
        "main(['--version'])\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert finished.returncode == 2
    assert finished.stderr == (
        f"repulsive: the command line needs {absent}; "
        "install it with: python -m pip install -e '.[cli]' -c constraints.txt\n"
    )


def test_a_missing_package_is_named_with_a_command_that_works_here(repulsive, monkeypatch):
    """In a checkout the editable install, elsewhere the package index."""
    missing = ModuleNotFoundError("No module named 'optuna'", name="optuna")
    monkeypatch.setattr("repulsive.environment.collect.collect", raising(missing))
    assert one_line(repulsive("doctor")).endswith("with: python -m pip install -e '.[train]' -c constraints.txt\n")
    monkeypatch.setattr("repulsive.extras.checkout", lambda: None)
    assert one_line(repulsive("doctor")).endswith("with: python -m pip install 'repulsive[train]'\n")


def test_the_console_script_is_installed():
    script = Path(sys.executable).with_name("repulsive")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    finished = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert finished.stdout == f"repulsive {__version__}\n"


def test_an_output_folder_that_cannot_be_written_is_an_error(repulsive, tmp_path):
    (tmp_path / "file").touch()
    done = repulsive("bench", "--device", "cpu", "--out", "file", "--rounds", "1", "--no-growth", "--tokens", "32")
    advice = "choose another path, or check its permissions and the free space"
    assert (done.code, done.err) == (2, f"repulsive: file: File exists; {advice}\n")
    json_file = tmp_path / "earlier.json"
    json_file.write_text("{}")
    for path in ("file/b.json", ".", "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(json_file)
        done = repulsive("bench", "--device", "cpu", "--json", path, "--rounds", "1", "--no-growth", "--tokens", "32")
        assert done.code == 2 and done.err.startswith(f"repulsive: --json {path}: ") and "; choose another" in done.err
    assert json_file.read_text() == "{}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_an_error():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "repulsive", "ls"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "repulsive: output: No space left on device\n")


def test_warnings_are_lines_and_a_missing_numpy_is_not_reported_twice(capsys):
    with warnings_as_lines():
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        warnings.warn("heads are\nequal", stacklevel=1)
    assert capsys.readouterr().err == "repulsive: heads are equal\n"

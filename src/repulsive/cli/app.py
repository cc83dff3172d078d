"""The Typer application: which verbs there are, and how a mistake ends."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from repulsive._version import __version__
from repulsive.cli.bench import bench
from repulsive.cli.demo import demo
from repulsive.cli.evaluate import evaluate
from repulsive.cli.export import export
from repulsive.cli.heads import heads
from repulsive.cli.inspect import inspect
from repulsive.cli.judge import judge
from repulsive.cli.ls import ls
from repulsive.cli.prepare import prepare
from repulsive.cli.report import report
from repulsive.cli.reproduce import reproduce
from repulsive.cli.say import complain, warnings_as_lines
from repulsive.cli.sweep import sweep
from repulsive.cli.train import train
from repulsive.cli.translate import translate
from repulsive.errors import RepulsiveError
from repulsive.lab.engine.stop_signals import Stopped

# Package -> the extra it comes with, for those whose absence no verb tells of itself.
EXTRAS = dict.fromkeys(("accelerate", "numpy", "safetensors", "tensorboard", "optuna"), "train")
EXTRAS |= dict.fromkeys(("transformers", "tokenizers"), "transformers") | {"matplotlib": "report"}

_MEMORY = "out of memory; use smaller batches, fewer --jobs or less data, or a machine with more memory"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(heads)
app.command()(inspect)
app.command()(bench)
app.command()(prepare)
app.command()(train)
app.command()(evaluate)
app.command()(report)
app.command()(ls)
app.command()(sweep)
app.command()(reproduce)
app.command()(translate)
app.command()(export)
app.add_typer(judge, name="judge")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"repulsive {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Multi-head attention whose heads do not collapse."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def verbs() -> list[str]:
    """The names of all verbs."""
    return sorted(typer.main.get_group(app).commands)


def run(arguments: list[str]) -> int:
    """Run the application and return its exit code.

    Args:
        arguments: the words after `repulsive`.

    Returns:
        0; 2 after one line on stderr where the user can put it right; 128 and the number of the signal where one
        ended it: 130 after Ctrl-C, 143 after SIGTERM.
    """
    if (number := next((i for i, word in enumerate(arguments, 1) if not _is_text(word)), 0)) > 0:
        return _complain(f"word {number} of the command line is not UTF-8 ({arguments[number - 1]!a}); rename the file")
    try:
        with warnings_as_lines():
            code = app(args=arguments, prog_name="repulsive", standalone_mode=False)
    except RepulsiveError as error:
        return _complain(str(error))
    except Stopped as stopped:
        return _complain(str(stopped), stopped.code)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        remedy = f"install it with: pip install 'repulsive[{EXTRAS[package]}]'"
        return _complain(f"this needs the package {package}; {remedy}")
    except MemoryError:
        return _complain(_MEMORY)
    except OSError as error:  # a full disk, a folder that is a file, a place that is not ours
        return _complain(f"{error.filename or 'output'}: {error.strerror}" if error.strerror else str(error))
    except Exception as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):  # how torch runs out of memory
            return _complain(_MEMORY)
        # Click's usage errors: Typer has its own copy of Click in some versions, so they are known by their method.
        if not hasattr(error, "format_message"):
            raise
        return _complain(f"{error.format_message()} (see: repulsive --help)")
    if code == 130:  # Ctrl-C: some versions of Typer raise, some return
        return _complain("stopped", code)
    return code if isinstance(code, int) else 0


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _complain(message: str, code: int = 2) -> int:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun starts a command many times: one on each machine speaks
        complain(message)
    return code

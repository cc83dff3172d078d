"""The Typer application: its verbs, and how exceptions become exit codes and one-line messages."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from repulsive._version import __version__
from repulsive.cli.bench import bench
from repulsive.cli.demo import demo
from repulsive.cli.doctor import doctor
from repulsive.cli.evaluate import evaluate
from repulsive.cli.export import export
from repulsive.cli.heads import heads
from repulsive.cli.inspect import inspect
from repulsive.cli.judge import judge
from repulsive.cli.ls import ls
from repulsive.cli.output import print_error, warnings_as_lines
from repulsive.cli.prepare import prepare
from repulsive.cli.prune import prune
from repulsive.cli.report import report
from repulsive.cli.reproduce import reproduce
from repulsive.cli.sweep import sweep
from repulsive.cli.train import train
from repulsive.cli.translate import translate
from repulsive.errors import RepulsiveError
from repulsive.extras import install_command
from repulsive.lab.engine.stop_signals import Stopped
from repulsive.safety.local_paths import remote_argument

# Optional package -> the extra that installs it, for packages that verbs import without a check of their own.
EXTRAS = dict.fromkeys(("accelerate", "numpy", "safetensors", "tensorboard", "optuna"), "train")
EXTRAS |= dict.fromkeys(("transformers", "tokenizers"), "transformers") | {"matplotlib": "report", "PIL": "images"}

_MEMORY = "out of memory; use smaller batches, fewer --jobs or less data, or a machine with more memory"

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(demo)
app.command()(doctor)
app.command()(heads)
app.command()(inspect)
app.command()(prune)
app.command()(bench)
app.add_typer(prepare, name="prepare")
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train and analyse multi-head attention whose heads repel each other."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def verbs() -> list[str]:
    """List the names of all verbs."""
    return sorted(typer.main.get_group(app).commands)


def run(arguments: list[str]) -> int:
    """Run the application and return its exit code.

    Args:
        arguments: the words after `repulsive`.

    Returns:
        0 for success; 1 if `doctor` finds a broken package; 2 after a one-line error message for mistakes that the user
        can fix; 128 plus the signal number after a signal: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1.

    Raises:
        Exception: an unexpected error; Python prints a traceback and exits with 1.
    """
    if (number := next((i for i, word in enumerate(arguments, 1) if not _is_text(word)), 0)) > 0:
        return _fail(f"argument {number} is not UTF-8 ({arguments[number - 1]!a}); rename the file")
    if problem := remote_argument(arguments):
        return _fail(problem)
    try:
        with warnings_as_lines():
            code = app(args=arguments, prog_name="repulsive", standalone_mode=False)
    except RepulsiveError as error:
        return _fail(str(error))
    except Stopped as stopped:
        return _fail(str(stopped), stopped.code)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        return _fail(f"this needs the package {package}; install it with: {install_command(EXTRAS[package])}")
    except MemoryError:
        return _fail(_MEMORY)
    except OSError as error:  # for example a full disk, or missing permissions
        if error.filename:
            advice = "choose another path, or check its permissions and the free space"
            return _fail(f"{error.filename}: {error.strerror}; {advice}")
        return _fail(f"output: {error.strerror}" if error.strerror else str(error))
    except Exception as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):  # torch ran out of memory
            return _fail(_MEMORY)
        # Usage errors of Click. Some versions of Typer contain their own copy of Click, so check for the method.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "repulsive")
        return _fail(f"{error.format_message()} (see: {command} --help)")
    if code == 130:  # Ctrl-C: some versions of Typer raise an exception, others return 130
        return _fail("stopped", code)
    return code if isinstance(code, int) else 0


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fail(message: str, code: int = 2) -> int:
    """Print an error, and return the exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun only one process per machine prints
        print_error(message)
    return code

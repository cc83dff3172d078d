"""The `repulsive` command: one file per verb, without logic."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

NEEDS = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its exit code; see `repulsive.cli.app.run`.

    Args:
        arguments: the words after `repulsive`; default: those of the process.

    Raises:
        SystemExit: always.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        from repulsive.extras import install_command

        remedy = f"install it with: {install_command('cli')}"
        print(f"repulsive: the command line needs {' and '.join(missing)}; {remedy}", file=sys.stderr)
        raise SystemExit(2)
    from repulsive.cli.app import run

    raise SystemExit(run(sys.argv[1:] if arguments is None else list(arguments)))

"""Format the facts about an installation as text."""

from __future__ import annotations

import textwrap

from repulsive.environment.collect import Environment, Extra
from repulsive.extras import install_command

WIDTH = 80  # columns of a terminal


def describe(environment: Environment) -> str:
    """Format an environment as text of about thirty lines.

    Returns:
        General facts, environment variables, extras with their packages, the command that installs what is missing,
        plugins, and problems of required packages.
    """
    torch, triton = environment.torch, environment.triton
    facts = {
        "repulsive": f"{environment.version} in {environment.location}",
        "Python": f"{environment.python} ({environment.executable})",
        "platform": environment.platform,
        "torch": torch.version or torch.error,
        "CUDA": torch.cuda or "none in this build of torch",
        "cuDNN": torch.cudnn or "none",
        "devices": "; ".join(torch.devices) or "CPU only",
        "Triton": triton.version or "not installed",
        "Triton kernels": f"{'used' if triton.used else 'not used'} ({triton.reason})",
    }
    if torch.version is None:
        for name in ("CUDA", "cuDNN", "devices"):
            del facts[name]
    lines = _columns(list(facts.items()))
    lines += ["", "environment variables"]
    lines += [f"  {name}={value}" for name, value in environment.variables.items()] or ["  none is set"]
    lines += ["", "extras"]
    rows = [(f"  {extra.name}", _contents(extra)) for extra in environment.extras]
    lines += _columns(rows, WIDTH) or ["  unknown: the package has no metadata; install it with pip"]
    incomplete = [extra for extra in environment.extras if extra.missing]
    if incomplete:
        lines += ["", "to install what is missing"]
        names = ", ".join(extra.name for extra in incomplete)
        lines += _columns([("  command", install_command("NAME,..."))]) + _columns([("  names  ", names)], WIDTH)
    if environment.plugins:
        lines += ["", "plugins"]
        lines += [f"  {plugin.group}: {plugin.name} of {plugin.package}" for plugin in environment.plugins]
    if problems := environment.problems:
        lines += ["", "problems", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def _contents(extra: Extra) -> str:
    """The versions of an extra's own packages, the extras it includes, and what is missing."""
    listed = [f"{package.name} {package.version}" for package in extra.packages if not package.problem]
    listed += [f"[{name}]" for name in extra.includes]
    missing = ", ".join(f"{package.name} ({package.problem})" for package in extra.missing)
    return "; ".join(part for part in (", ".join(listed), f"needs {missing}" if missing else "") if part)


def _columns(rows: list[tuple[str, str]], most: int = 0) -> list[str]:
    """Align names and values; values that are too long for `most` columns continue on lines of their own."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = []
    for name, value in rows:
        parts = textwrap.wrap(value, most - width - 2, break_on_hyphens=False) if most else [value]
        lines.append(f"{name:<{width}}  {parts[0] if parts else ''}")
        lines += [" " * (width + 2) + part for part in parts[1:]]
    return lines

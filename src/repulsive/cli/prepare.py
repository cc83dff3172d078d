"""`repulsive prepare DATASET`: turn raw files, once, into a folder that training reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from repulsive.cli.output import print_json, print_text
from repulsive.errors import DataError
from repulsive.lab.systems.datasets import dataset_named, datasets
from repulsive.lab.text.dataset import VARIABLE, Dataset, Option


class _Group(TyperGroup):
    """One command per dataset, with errors that name the datasets."""

    def parse_args(self, context: Any, args: list[str]) -> Any:
        if args and args[0].startswith("-") and args[0] != "--help":
            raise DataError(f"expected a dataset before {args[0]}; give: repulsive prepare DATASET {args[0]} ...")
        return super().parse_args(context, args)

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            dataset_named(args[0])
        return super().resolve_command(context, args)


class _Command(TyperCommand):
    """The command of one dataset, with errors that name its options."""

    def parse_args(self, context: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(context, args)
        except Exception as error:
            # Click's NoSuchOption. Some versions of Typer have their own copy of Click, so it has no fixed class.
            if not hasattr(error, "possibilities"):
                raise
            flags = [parameter.opts[0] for parameter in self.params if not getattr(parameter, "hidden", False)]
            name = str(self.name)
            raise dataset_named(name).unknown_option(str(getattr(error, "option_name", "")), flags) from None


prepare = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, cls=_Group, subcommand_metavar="DATASET [OPTIONS]"
)


@prepare.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Prepare a dataset for training: tokenise it, build its vocabulary, store it with checksums."""
    if context.invoked_subcommand is None:
        print_text(context.get_help())


def _run(
    dataset: Dataset,
    data: Path | None,
    out: Path | None,
    jobs: int | None,
    force: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from repulsive.terminal.progress import progress_bar

    if jobs is not None and jobs < 1:
        raise typer.BadParameter(f"{jobs}: expected at least 1", param_hint="--jobs")
    options = {option.name: _parse(option, options[option.name]) for option in dataset.options}
    options = {name: value for name, value in options.items() if value is not None}
    out = out or Path("prepared", dataset.name, str(options.get(dataset.folder_option, "")).lower())
    plan = dataset.make_plan(data or dataset.default_data(), out, **options)
    is_new = force or plan.existing() is None
    if is_new:
        with progress_bar() as progress:
            prepared = plan.make(jobs, progress)
    if as_json:
        from repulsive.lab.text.folders import read_manifest

        print_json({"dataset": dataset.name, "folder": out, "is_new": is_new, "manifest": read_manifest(out)})
    elif is_new:
        print_text(f"{dataset.name} -> {out}\n{plan.summarize(prepared)}")
    else:
        print_text(f"{out} is prepared already, from the same files with the same settings; --force prepares it again")


def _parse(option: Option, value: Any) -> Any:
    """Convert a value of the command line; None if the option was not given."""
    if value is None or value == []:  # an option that may be repeated, in some versions of Typer
        return None
    try:
        return value if option.parse is None else option.parse(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=_flag(option)) from None


def _flag(option: Option) -> str:
    return option.flag or f"--{option.name.replace('_', '-')}"


def _parameters(dataset: Dataset) -> Iterator[inspect.Parameter]:
    """Declare the options of a dataset in the form that Typer reads."""
    places = {
        "folder": f"Folder with the raw files. Default: ${VARIABLE}/{dataset.name}, or ${VARIABLE}.",
        "corpus": f"Text file, archive, or a folder of them. Default: ${VARIABLE}/{dataset.name}.",
        "download": f"Folder to download to. Default: ${VARIABLE}/{dataset.name}, or downloads beside --out.",
        "nothing": "",
    }
    below = "".join(f"/{_flag(o)[2:].upper()}" for o in dataset.options if o.name == dataset.folder_option)
    own = [Option("data", Path, places[dataset.reads], hidden=dataset.reads == "nothing")]
    own += [Option("out", Path, "Folder to make.", f"prepared/{dataset.name}{below}"), *dataset.options]
    jobs = "Number of processes; one per processor if not given."
    own += [Option("jobs", int, jobs, hidden=not dataset.is_parallel)]
    own += [Option("force", bool, "Prepare the dataset again, even if it is there.", flag="--force")]
    own += [Option("as_json", bool, "Print one JSON document instead of text.", flag="--json")]
    annotated: Any = Annotated
    for option in own:
        names = [option.flag] if option.flag else []
        info: Any = typer.Option(*names, help=_help(option), hidden=option.hidden, show_default=False)
        kind = annotated[option.type | None, info]
        yield inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _help(option: Option) -> str:
    if option.default is None:
        return option.help
    default = option.default
    if default is True:
        default = _flag(option)[2:]
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{option.help} Default: {default}."


def _add(dataset: Dataset) -> None:
    def command(
        data: Path | None,
        out: Path | None,
        jobs: int | None,
        force: bool | None,
        as_json: bool | None,
        **options: Any,
    ) -> None:
        _run(dataset, data, out, jobs, bool(force), bool(as_json), options)

    parameters = list(_parameters(dataset))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    prepare.command(dataset.name, cls=_Command, help=dataset.summary)(command)


for _dataset in datasets().values():
    _add(_dataset)

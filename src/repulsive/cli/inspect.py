"""`repulsive inspect TARGET`: measure similarity and redundancy of the heads of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repulsive.cli.output import print_tables, print_text
from repulsive.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from repulsive.diagnostics.loading.model_inputs import ModelInputs
    from repulsive.pages.card import Card
    from repulsive.pages.data.pictures import Pictures


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a transformers model (config, weights, tokenizer); or the name of a model in the local "
            "Hugging Face cache; or package.module:name of an nn.Module, of its class, or of a function that makes one."
        ),
    ],
    text: Annotated[
        Path | None, typer.Option(help="Text file with one sentence per line, UTF-8. No labels are needed.")
    ] = None,
    sentence: Annotated[list[str] | None, typer.Option(help="A sentence to read; repeatable.")] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of pictures (PNG, JPEG, WebP, BMP), or one picture, for a vision transformer."),
    ] = None,
    example: Annotated[
        str,
        typer.Option(
            help="package.module:name of example inputs, for models that do not read text.", show_default=False
        ),
    ] = "",
    compare: Annotated[
        str,
        typer.Option(
            help="A second version of the model, such as after repulsion or pruning; both are shown on one page.",
            show_default=False,
        ),
    ] = "",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Ablate each head in turn; runs the text once per head, from its layer on.")
    ] = False,
    random: Annotated[
        bool, typer.Option("--random", help="Use random weights instead of those in the model folder.")
    ] = False,
    twins: Annotated[
        int, typer.Option(min=0, help="Number of untrained models of the same architecture to compare with.")
    ] = 3,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of sentences or pictures to read.")] = 32,
    length: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens per sentence; longer sentences are cut.")
    ] = 128,
    out: Annotated[Path, typer.Option(help="Output folder for inspect.html and inspect.json.")] = Path("."),
    card: Annotated[
        Path | None,
        typer.Option(help="Also write a social card, 1200 x 630, to this .svg or .png file.", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print a table of every layer and measure.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the content of inspect.json to stdout instead of tables.")
    ] = False,
) -> None:
    """Measure how similar the heads of a model are, and which are redundant."""
    from repulsive.diagnostics.loading.images import read_images
    from repulsive.diagnostics.loading.inputs import read_sentences
    from repulsive.diagnostics.loading.model import load_model
    from repulsive.diagnostics.loading.model_inputs import model_inputs, other_model
    from repulsive.pages.card import check_card, write_card

    if card:
        check_card(card)
    if bool(example) + bool(text or sentence) + bool(images) > 1:
        raise typer.BadParameter(
            "give only one of --text (with --sentence), --images and --example", param_hint="inputs"
        )
    if ablate and not (text or sentence or example or images):
        raise typer.BadParameter("needs inputs: add --text, --sentence, --images or --example", param_hint="--ablate")
    sentences = read_sentences(text, sentence or [], most)
    read = read_images(images, most) if images else []
    _make_folder(out)
    loaded = load_model(target, random=random)
    inputs = model_inputs(loaded, sentences, read, example, length=length)
    settings = {"ablation": ablate, "twins": twins, "separators": inputs.separators}
    job = _Job(target, inputs, "random" if random else loaded.revision[:12] or "as loaded", settings, out)
    if compare:
        other = other_model(inputs, load_model(compare, random=random))
        page, content = _compare(job, compare, other, as_json)
    else:
        page, content = _inspect(job, as_json, full)
    if not inputs.batches:
        print_text(
            "\nnote: without inputs only weights are measured; add --text, --sentence, --images or --example to measure"
            " the similarity of logits, attention and outputs, and the importance of heads",
            err=as_json,
        )
    if inputs.cut:
        print_text(f"\nnote: cut {inputs.cut} (--length)", err=as_json)
    written = [str(page), *([str(write_card(card, content))] if card else [])]
    print_text(f"\nwritten to {' and '.join(written)}", err=as_json)


@dataclass(frozen=True, eq=False)
class _Job:
    """A model to inspect.

    Args:
        target: the model, as given on the command line.
        inputs: the loaded model and what it reads.
        weights: origin of the weights, for the page.
        settings: arguments of `inspect_heads` and `compare_models`.
        out: output folder.
    """

    target: str
    inputs: ModelInputs
    weights: str
    settings: dict[str, Any]
    out: Path

    def facts(self, names: list[tuple[str, str]], items: int) -> list[tuple[str, str]]:
        """List the (name, value) pairs at the top of the page."""
        return [*names, ("Weights", self.weights), ("Inputs read", str(items)), *self.inputs.facts]

    def pictures(self) -> Pictures | None:
        """Return the inputs if they are pictures."""
        from repulsive.pages.data.pictures import Pictures

        images = self.inputs.images
        return Pictures(images.layout, images.names, images.pictures) if images else None

    def shown(self) -> dict[str, Any]:
        """Return the inputs as arguments of the functions that render a page."""
        return {"tokens": self.inputs.tokens, "pictures": self.pictures()}

    def write(self, page: str, numbers: str) -> Path:
        """Write the page and its numbers; return the path of the page."""
        from repulsive.pages.inspection_page import write_page_and_numbers

        return write_page_and_numbers(self.out, page, numbers)


def _inspect(job: _Job, as_json: bool, full: bool) -> tuple[Path, Card]:
    """Inspect a model, print the result, and write its page; returns the page and the content of a card."""
    from repulsive.diagnostics.inspection import inspect_heads
    from repulsive.diagnostics.short_summary import short_summary
    from repulsive.diagnostics.summary import as_text
    from repulsive.pages.inspection_page import inspection_card, inspection_json, render_inspection

    with _ablation_bar() as progress:
        result = inspect_heads(job.inputs.model, job.inputs.batches, progress=progress, **job.settings)
    numbers = inspection_json(result)
    if as_json or full:
        print_text(numbers if as_json else as_text(result))
    else:
        print_tables(short_summary(result))
    facts = job.facts([("Model", job.target)], result.items)
    page = render_inspection(result, title=f"Heads of {job.target}", facts=facts, **job.shown())
    return job.write(page, numbers), inspection_card(result, _short(job.target), job.pictures())


def _compare(job: _Job, name: str, other: nn.Module, as_json: bool) -> tuple[Path, Card]:
    """Compare a model with another version of it, as `_inspect` does for one model."""
    from repulsive.diagnostics.comparison_summary import comparison_text
    from repulsive.diagnostics.model_comparison import compare_models
    from repulsive.pages.comparison_page import comparison_card, encode_comparison, render_comparison

    with _ablation_bar() as progress:
        result = compare_models(job.inputs.model, other, job.inputs.batches, progress=progress, **job.settings)
    numbers = encode_comparison(result)
    print_text(numbers if as_json else comparison_text(result))
    facts = job.facts([("Before", job.target), ("After", name)], result.before.items)
    page = render_comparison(result, title=f"Heads of {job.target} and {name}", facts=facts, **job.shown())
    return job.write(page, numbers), comparison_card(result, _short(job.target), job.pictures())


def _short(target: str) -> str:
    """Return the name of a model without its parent folders, for a card."""
    path = Path(target)
    return (path.parent if path.name == "config.json" else path).resolve().name if path.exists() else target


@contextmanager
def _ablation_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the time left while heads are ablated; nothing without a terminal."""
    from repulsive.terminal.progress import progress_bar

    with progress_bar(lines=False) as bar:
        yield lambda done, total: bar("ablating heads", done, total)


def _make_folder(out: Path) -> None:
    from repulsive.safety.folders import check_creatable

    try:
        out.mkdir(parents=True, exist_ok=True)
        check_creatable(out / "inspect.html")
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: cannot be written ({error.strerror}); choose another folder") from None

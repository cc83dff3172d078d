"""The page of the demo: what was found, how different heads are, one sentence, the loss, and what to try next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from repulsive.lab.bench.machine import describe
from repulsive.lab.demo.example import Chosen
from repulsive.lab.demo.findings import LARGEST, LOSS, MEAN, MEASURES, Findings, Measure
from repulsive.lab.demo.runs import used_versions
from repulsive.lab.demo.settings import ARMS, PENALTY, PLAIN, REGULARIZED, REPELLED
from repulsive.pages.charts import learning_curve
from repulsive.pages.data.layers import Layered
from repulsive.pages.data.panels import Grid, Sheet
from repulsive.pages.data.seeds import SeedChart
from repulsive.pages.html.document import asset, document, fact_list, header, write_whole
from repulsive.pages.html.layer_explorer import layer_explorer
from repulsive.pages.html.panel import charts_with_legend, grid_rows, sheet_table
from repulsive.pages.html.seed_chart import seed_chart
from repulsive.pages.html.svg_chart import legend
from repulsive.pages.text import escaped, number
from repulsive.particles.named import RECOMMENDED, RuleName, rule_by_name
from repulsive.repulsion.display import short_rule

TITLE = "Heads that repel each other: the demo"
_ROOM = 2_000_000  # bytes for the maps of the example
_FIXED = (
    "All settings were fixed before the demo was run, and none was chosen by its effect on this text. Models with the "
    "same seed start with the same weights and read the same text in the same order."
)
_INTERVALS = (
    "A dot is one training run, and a line joins the runs of one seed. The second chart of a pair shows the difference "
    "from plain training, seed by seed, with its mean and 95 % confidence interval (Student's t). If the interval "
    "contains zero, the difference is not significant."
)


def write_page(
    path: Path, findings: Findings, chosen: Chosen, example: Layered, facts: Sequence[tuple[str, str]]
) -> Path:
    """Write the page as one self-contained HTML file.

    Args:
        path: the HTML file.
        findings: results of all runs.
        chosen: the sentence that is shown.
        example: attention on that sentence.
        facts: (name, value) pairs about the text and the runs.

    Returns:
        The path written.
    """
    sentences = f"{findings.heads_sentence()} {findings.loss_sentence()}"
    body = header(TITLE, _typographic(sentences), lead_class="verdict")
    body += _paragraphs(f"{_over(findings)} {_FIXED}")
    body += _section("How different are the heads?", _difference(findings, chosen.seed))
    title = "The same sentence through both models"
    body += layer_explorer([example], [PLAIN, REPELLED], _ROOM, heading=title, lead=_sentence(chosen))
    body += _section("Does it help?", _loss(findings))
    body += _section("During training", _curves(findings))
    body += _section("Your turn", _your_turn(findings, path.parent))
    body += _section("Settings", fact_list([*settings_facts(findings), *facts, *_machine()]))
    return write_whole(path, document(TITLE, body, script=asset("attention_map.js") + asset("layer_explorer.js")))


def numbers_sheet(findings: Findings) -> Sheet:
    """Make the table of all numbers: one row per measure, means and differences of every arm."""
    columns = ["measure", PLAIN, REPELLED, "difference", REGULARIZED, "difference"]
    rows = []
    for measure in MEASURES:
        row = [measure.short, findings.mean(PLAIN, measure)]
        for arm in (REPELLED, REGULARIZED):
            row += [findings.mean(arm, measure), str(findings.difference(arm, measure))]
        rows.append([_typographic(cell) for cell in row])
    intervals = "" if len(findings.seeds) == 1 else ", with 95 % confidence intervals"
    return Sheet(f"Means over {findings.over}, and differences from plain training{intervals}.", columns, rows)


def settings_facts(findings: Findings) -> list[tuple[str, str]]:
    """List the settings of all runs."""
    settings = next(iter(findings.results.values())).job.settings
    size = sum(p.numel() for p in findings.results[PLAIN, findings.seeds[0]].model().parameters())
    return [
        ("Model", f"{settings.layers} layers of {settings.heads} heads, width {settings.width}; {size:,} weights"),
        ("Training", f"{settings.steps} steps of {settings.batch} x {settings.length} bytes"),
        ("Optimizer", f"AdamW, learning rate {settings.lr:g}, weight decay 0.1, warm-up, cosine decay"),
        ("Rule of the repelled models", short_rule(rule_by_name(settings.rule))),
        ("Regularizer", f"disagreement of head outputs (Li et al., 2018), weight {PENALTY:g}"),
        ("Seeds", ", ".join(map(str, findings.seeds))),
    ]


def _difference(findings: Findings, seed: int) -> str:
    heads = next(iter(findings.results.values())).job.settings.heads
    lowest = number(-1 / (heads - 1), 2)
    lead = (
        "The similarity of two heads is the cosine between their attention logits on held-out text: 1 for heads "
        "with the same logits, 0 for unrelated heads, negative for opposite ones. The mean is over all pairs of heads "
        f"of a layer, and over layers; {heads} heads cannot have a lower mean than {lowest}. The largest pair is the "
        "most similar pair of heads of any layer."
    )
    grids = [
        Grid(arm, cosines, f"every pair of heads, models of seed {seed}", f"layer {layer}")
        for arm in (PLAIN, REPELLED)
        for layer, cosines in enumerate(findings.results[arm, seed].cosines)
    ]
    return _paragraphs(lead, _INTERVALS) + _seed_charts(findings, (MEAN, LARGEST)) + grid_rows(grids)


def _sentence(chosen: Chosen) -> str:
    effect, median = (number(value, 2, signed=True) for value in (chosen.effect, chosen.median))
    return (
        f"“{chosen.sentence}” is held-out text, read by the plain and the repelled model of seed {chosen.seed}, one "
        f"character at a time. Of {chosen.candidates} pairs of a sentence and a seed, this is the one whose effect is "
        f"nearest the median: repulsion changes the mean similarity of heads by {effect} here; the median is {median}."
    )


def _loss(findings: Findings) -> str:
    lead = f"{findings.loss_sentence()} {findings.loss_sentence(REGULARIZED)}"
    explained = (
        "The regularizer is a term of the loss that penalises similar outputs of heads. Larger studies, with "
        "learning rates chosen for every method, are in the documentation, under “Repulsion between attention logits”."
    )
    return _paragraphs(lead, explained) + _seed_charts(findings, (LOSS,)) + sheet_table(numbers_sheet(findings))


def _curves(findings: Findings) -> str:
    def of(key: str) -> dict[str, list[list[tuple[float, float]]]]:
        return {
            arm: [
                [(each.step, getattr(each, key)) for each in findings.results[arm, seed].history]
                for seed in findings.seeds
            ]
            for arm in ARMS
        }

    charts = [learning_curve("training loss, nats per byte", of("loss")), learning_curve(MEAN.name, of("mean"))]
    which = f"Mean over {findings.over}; the band is one standard deviation."
    if len(findings.seeds) == 1:
        which = f"Seed {findings.seeds[0]}."
    lead = f"{which} The training loss does not include the regularizer."
    return _paragraphs(lead) + charts_with_legend(charts, ARMS)


def _your_turn(findings: Findings, folder: Path) -> str:
    rule = next(iter(findings.results.values())).job.settings.rule
    code = (
        "from repulsive import repel\n\n"
        f"{repel_line(rule)}  # before training; the loop stays as it is\n"
        "...\n"
        "print(handle)  # similarity of heads at the start and now"
    )
    return (
        _paragraphs("In your own training loop it is one line:")
        + _code(code)
        + _paragraphs("Look into the heads of the models above, or into any transformers model that you have:")
        + _code("\n".join([*inspect_commands(folder), "repulsive inspect path/to/model --text sentences.txt"]))
    )


def repel_line(rule: RuleName) -> str:
    """Write the line of Python that attaches a rule."""
    return "handle = repel(model, optimizer)" if rule == RECOMMENDED else f'handle = repel(model, optimizer, "{rule}")'


def inspect_commands(folder: Path) -> list[str]:
    """List the commands that inspect the repelled model of the demo."""
    module = "repulsive.lab.demo.trained"
    return [f"cd {shlex.quote(str(folder))}", f"repulsive inspect {module}:repelled --example {module}:windows"]


def _seed_charts(findings: Findings, measures: Sequence[Measure]) -> str:
    figures = ""
    for measure in measures:
        values = {arm: findings.values(arm, measure) for arm in ARMS}
        figures += seed_chart(SeedChart(measure.name, values, findings.seeds, joined=True, digits=measure.digits), ARMS)
        changes = {arm: findings.difference(arm, measure) for arm in (REPELLED, REGULARIZED)}
        intervals = {arm: each.interval for arm, each in changes.items() if each.interval is not None}
        of_seeds = {arm: each.values for arm, each in changes.items()}
        name = f"difference from plain: {measure.name}"
        figures += seed_chart(
            SeedChart(name, of_seeds, findings.seeds, intervals, zero=True, digits=measure.digits), ARMS
        )
    return f'{legend(ARMS, ARMS, dots=True)}<div class="charts pairs">{figures}</div>\n'


def _machine() -> list[tuple[str, str]]:
    machine = describe("cpu")
    used = ", ".join(f"{name} {version}" for name, version in used_versions().items())
    return [
        ("Machine", f"{machine['cores']} cores, {machine['machine']}"),
        ("Versions", used),
        ("Date", machine["date"]),
    ]


def _over(findings: Findings) -> str:
    if len(findings.seeds) == 1:
        return f"One training run of each kind, seed {findings.seeds[0]}."
    return f"Three kinds of training, {findings.over} each; brackets are 95 % confidence intervals."


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escaped(title)}</h2>\n{body}</section>\n"


def _paragraphs(*texts: str) -> str:
    return "".join(f"<p>{escaped(_typographic(text))}</p>\n" for text in texts)


def _code(text: str) -> str:
    return f'<pre class="code" tabindex="0"><code>{escaped(text)}</code></pre>\n'


def _typographic(text: str) -> str:
    """Replace the hyphens of negative numbers by minus signs."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", text)

"""Sample report like that of the demo, with generated reviews and synthetic attention."""

import torch

from repulsive.lab.systems.classification.generated import generate
from repulsive.metrics.compare import Comparison
from repulsive.pages import Cell, Chart, Content, Example, Metric, Reading, Row, Series, Table

METHODS = ("MA", "MA + R", "SVGD", "SPOS")


def peaked(evidence: list[tuple[int, ...]], heads: int, words: int, spread: float, seed: int) -> torch.Tensor:
    """Attention [M, T] with peaks on evidence: of one aspect for all heads at `spread` 0, of all aspects at 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(heads, words, generator=generator)
    for head in range(heads):
        aspect = head % len(evidence) if head < spread * heads else 0
        logits[head, list(evidence[aspect])] += 5.0
    return logits.softmax(-1)


def sample_table() -> Table:
    metrics = [
        Metric("Accuracy", digits=1, percent=True, meaning="Share of test reviews with the correct number of stars."),
        Metric("NLL", "lower", meaning="Negative log-likelihood of the true class, in nats."),
        Metric("Dist", meaning="Mean distance between the representations of two heads, as in the paper."),
        Metric("Relative Dist", meaning="Dist over the mean norm of the representations."),
        Metric("Overlap", "lower", meaning="Overlap of the attention of two heads, mean over pairs."),
        Metric(
            "Coverage", digits=1, percent=True, meaning="Share of aspects whose evidence at least one head attends to."
        ),
        Metric("ECE", "lower", digits=1, percent=True),
    ]
    numbers = {
        "MA": (0.684, 0.802, 0.246, 0.412, 0.713, 0.541, 0.061),
        "MA + R": (0.687, 0.797, 0.536, 0.655, 0.402, 0.602, 0.058),
        "SVGD": (0.712, 0.751, 1.602, 0.934, 0.221, 0.812, 0.049),
        "SPOS": (0.709, 0.760, 1.655, 0.951, 0.198, 0.833, 0.052),
        "gradient x eps/M": (0.681, 0.806, 0.240, 0.405, 0.720, 0.536, 0.063),
    }
    rows = []
    for method, means in numbers.items():
        cells = []
        for place, mean in enumerate(means):
            gap = mean - numbers["MA"][place]
            width = 0.4 * abs(gap) if method in ("SVGD", "SPOS") else 2 * abs(gap) + 0.004
            compared = Comparison(gap, gap - width, gap + width, 0.0004 if width < abs(gap) else 0.31, "both", 3, 1000)
            cells.append(Cell(mean, abs(mean) * 0.012, None if method == "MA" or place == 6 else compared))
        rows.append(Row(method, cells, control=method.startswith("gradient")))
    notes = [
        "SVGD and SPOS cover more evidence than plain attention, and their heads overlap less.",
        "There is no significant difference between SVGD and SPOS. ECE was not tested.",
    ]
    caption = "1,000 generated reviews, 10 heads, three seeds. The numbers are invented to test the page."
    return Table(metrics, rows, baseline="MA", caption=caption, notes=notes)


def sample_charts() -> list[Chart]:
    def line(method: str, start: float, end: float, rate: float) -> Series:
        wave = [(17 * step % 7 - 3) / 120 * abs(end - start) for step in range(41)]
        points = [(50.0 * i, end + (start - end) * 2.718 ** (-rate * i / 10) + wave[i]) for i in range(41)]
        return Series(method, points)

    rates = dict(zip(METHODS, (1.0, 1.1, 0.8, 0.7), strict=True))
    ends = dict(zip(METHODS, (0.25, 0.54, 1.60, 1.65), strict=True))
    return [
        Chart("Train loss", [line(m, 1.6, 0.60 + 0.03 * i, rates[m]) for i, m in enumerate(METHODS)]),
        Chart("Dev accuracy (%)", [line(m, 21, 68 + 1.1 * i, rates[m]) for i, m in enumerate(METHODS)]),
        Chart("Head diversity (Dist)", [line(m, 0.9, ends[m], rates[m]) for m in METHODS]),
    ]


def sample_examples(count: int = 6, heads: int = 10) -> list[Example]:
    examples = []
    for number, review in enumerate(generate(count, seed=3, aspects=(4, 5), filler=2)):
        spreads = dict(zip(METHODS, (0.1, 0.3, 1.0, 1.0), strict=True))
        readings = []
        for place, (method, spread) in enumerate(spreads.items()):
            places = list(review.evidence.values())
            weights = peaked(places, heads, len(review.tokens), spread, 10 * number + place)
            stars = review.stars if place > 1 else review.stars % 5 + 1
            readings.append(Reading(method, f"{stars} stars", 0.55 + 0.1 * place, weights))
        examples.append(Example(review.tokens, f"{review.stars} stars", readings, review.evidence))
    return examples


def sample_content(count: int = 6, heads: int = 10) -> Content:
    facts = [
        ("Data", "generated reviews, 8,000 / 1,000 / 1,000"),
        ("Model", "BiLSTM, additive attention, 10 heads"),
        ("Seeds", "0, 1, 2"),
        ("Versions", "repulsive 0.1, torch 2.13.0"),
        ("Time", "412 s"),
        ("Command", "repulsive demo --seeds 3 --out demo"),
    ]
    return Content(
        "Heads that do not collapse",
        "The same classifier, trained with four methods on reviews whose stars depend on several aspects.",
        facts,
        sample_table(),
        sample_charts(),
        sample_examples(count, heads),
    )

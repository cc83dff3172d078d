"""Ratio of repulsion to drive at the initial weights of the paper's Transformer, for each kind of attention.

    python -m studies.translation.first_ratios --data prepared/europarl-160k

The published rule, one seed. The weights do not change: gradients of several batches are measured, each at the initial
weights. Writes RESULTS/first_ratios.md; a batch takes about half a minute of one CPU core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from studies.arguments import errors_in_one_line
from studies.output import save

from repulsive import repel
from repulsive.lab.runs.plan import plan
from repulsive.lab.systems.registry import make_task
from repulsive.repulsion.measurements import GroupReport
from repulsive.safety.markdown import format_table

Kind = tuple[str, str]  # kind of attention, and part: "q", "k" or "v"
LEAD = """# Repulsion and drive at the initial weights

The published rule in the Transformer of the paper's settings (6+6 layers, width {width}, 4 heads), before training, in
float32 on a CPU. Means over the six layers of each kind and {batches} batches of at most {tokens:,} tokens, one seed.
*Ratio* is |repulsion| / |drive|. *Drive per weight* is the root mean square of what Adam receives from the loss; its
epsilon is 1e-8. With a stepsize of 0.01 instead of 0.1 the drive is a tenth, and the ratio the same.
"""


def measure(data: Path, batches: int, changes: Sequence[str]) -> dict[Kind, list[GroupReport]]:
    """Measure the gradients of the first batches at the initial weights."""
    settings = [f"data.folder={data}", "packed=false", "training.precision=fp32", "training.compile=false", *changes]
    (spec,) = plan(["iwslt14/svgd"], settings, seed=0, device="cpu")
    task = make_task(spec.recipe)
    torch.manual_seed(0)
    model = task.model()
    task.to(torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # measures, and leaves the weights as they are
    reports: dict[Kind, list[GroupReport]] = defaultdict(list)
    with repel(model, optimizer, "paper", measure_every=1, verbose=False) as handle:
        for batch in itertools.islice(task.order(0), batches):
            optimizer.zero_grad()
            task.loss(model, task.fetch(batch), batch.length).backward()
            optimizer.step()
            for report in handle.report():
                reports[report.where, report.part].append(report)
    return reports


def table(reports: dict[Kind, list[GroupReport]], weights: int) -> str:
    """Format the means of each kind of attention and part.

    Args:
        reports: measurements by kind of attention and part.
        weights: number of weights of a group.
    """
    rows = []
    for (where, part), some in sorted(reports.items()):
        ratio, drive = (statistics.fmean(getattr(one, name) for one in some) for name in ("ratio", "drive"))
        rows.append([where, part, f"{ratio:.4f}", f"{drive / math.sqrt(weights):.1e}"])
    return format_table(["attention", "part", "ratio", "drive per weight"], rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("prepared/europarl-160k"), help="prepared data")
    parser.add_argument("--batches", type=int, default=8, help="batches to measure")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a batch")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    parser.add_argument("--results", type=Path, default=Path("results/translation"), help="folder of the table")
    arguments = parser.parse_args(words)
    sizes = [f"training.batch={arguments.tokens}", f"model.width={arguments.width}"]
    with errors_in_one_line(parser):
        reports = measure(arguments.data, arguments.batches, sizes)
    lead = LEAD.format(batches=arguments.batches, tokens=arguments.tokens, width=arguments.width)
    text = f"{lead}\n{table(reports, arguments.width**2)}\n"
    save(arguments.results / "first_ratios.md", text)
    print(text)


if __name__ == "__main__":
    main()

"""Why cross-attention does not learn under the published rule: can the encoder tell tokens apart?

    python -m studies.translation.encoder_tokens --data prepared/europarl-160k --rows plain published
    python -m studies.translation.encoder_tokens --tables

A narrow twin of the paper's Transformer (6+6 layers, 4 heads, learning rate 5e-4, warm-up of 4,000 steps) that a CPU
can train: width 128, dropout 0.1, batches of 1,024 tokens. All rows see the same batches in the same order. 4,000 steps
take 25 minutes of one core. Rows that are finished in RECORDS are not trained again. `--tables` writes
RESULTS/encoder_tokens.md and its figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from studies.arguments import errors_in_one_line
from studies.output import save, write_svgs
from studies.translation.measuring_task import PROBE, measure_attention, probe_of
from torch import Tensor

from repulsive import HeadMonitor, repel
from repulsive.heads import HeadGroup, find_heads
from repulsive.lab.engine.files import read_json
from repulsive.lab.runs.plan import plan
from repulsive.lab.systems.registry import make_task
from repulsive.pages.charts import learning_curve
from repulsive.particles.named import RuleName
from repulsive.safety.markdown import format_table

NAME = "encoder_tokens"
STEPS, EVERY = 4000, 250
LR, WARM_UP = 5e-4, 4000
AT = (1000, 2000, 3000, 4000)  # steps in the tables
MODEL = ("model.width=128", "model.depth=[6, 6]", "model.feed_forward=256", "model.dropout=0.1", "training.batch=1024")
Point = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of the tables.

    Args:
        label: in tables.
        rule: name of the rule; None for plain training.
        selection: arguments of `repel` that select heads.
        longer: factor on the values of the encoder before the first step.
    """

    label: str
    rule: RuleName | None = "paper"
    selection: Mapping[str, Any] = field(default_factory=dict)
    longer: float = 1.0


ROWS = {
    "plain": Row("plain", rule=None),
    "published": Row("published"),
    "published-qk": Row("published, q and k only", selection={"parts": "qk"}),
    "published-v": Row("published, v only", selection={"parts": "v"}),
    "published-encoder": Row("published, encoder only", selection={"where": "encoder"}),
    "published-encoder-v": Row("published, v of the encoder only", selection={"where": "encoder", "parts": "v"}),
    "published-decoder": Row("published, decoder only", selection={"where": "decoder"}),
    "published-cross": Row("published, cross-attention only", selection={"where": "cross"}),
    "long-v": Row("plain, v of the encoder doubled", rule=None, longer=2.0),
    "recommended": Row("recommended (sphere)", rule="recommended"),
}
TABLES = {  # measurement -> sentence before its table, and decimals
    "loss": ("Loss of training (label-smoothed), mean over the {every} steps before:", 3),
    "token_cosine": ("Cosine between the states that the encoder gives to two tokens of a sentence:", 3),
    "entropy/encoder": ("Entropy of attention in the encoder, nats (log {length} = {even:.3f} if it is even):", 2),
    "entropy/cross": ("Entropy of cross-attention, nats:", 2),
    "norm/encoder/qk": ("Norm of a head, q and k of the encoder:", 1),
    "norm/cross/qk": ("Norm of a head, q and k of cross-attention:", 1),
    "norm/encoder/v": ("Norm of a head, v of the encoder:", 1),
}
DRAWN = {
    "token_cosine": "Cosine between two tokens of a sentence, after the encoder",
    "entropy/cross": "Entropy of cross-attention, nats",
}
LEAD = """# Can the encoder tell tokens apart?

A narrow twin of the Transformer of the paper's settings, on the same data: 6+6 layers, width 128, 4 heads, learning
rate 5e-4, warm-up of 4,000 steps, dropout 0.1, batches of 1,024 tokens; float32 on a CPU, one seed. All rows see the
same batches. Attention is measured on 16 sentence pairs of the development set, each source of {length} pieces; means
over heads and layers. Command: `studies/translation/encoder_tokens.py`.
"""


def train(row: Row, data: Path, steps: int, every: int) -> Iterator[Point]:
    """Train a row, and yield the measurements of every few steps."""
    settings = [f"data.folder={data}", "packed=false", "training.precision=fp32", "training.compile=false", *MODEL]
    (spec,) = plan(["iwslt14/svgd"], settings, seed=0, device="cpu")
    task = make_task(spec.recipe)
    torch.manual_seed(0)
    model = task.model()
    task.to(torch.device("cpu"))
    groups = find_heads(model)
    _lengthen([group for group in groups if (group.where, group.part) == ("encoder", "v")], row.longer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=1e-4)
    if row.rule is not None:
        repel(model, optimizer, row.rule, verbose=False, **row.selection)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    probe = probe_of(task.parts["dev"])
    monitor, losses = HeadMonitor(model, every=1, probe=probe, items=PROBE), list[Tensor]()
    batches = itertools.chain.from_iterable(task.order(epoch) for epoch in itertools.count())
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        optimizer.zero_grad()
        loss = task.loss(model, task.fetch(batch), batch.length)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % every == 0:
            point = {"step": step, "length": probe[0].shape[1], "loss": float(torch.stack(losses).mean())}
            yield point | measure_attention(monitor.measure()) | _norms(groups)
            losses.clear()


def _rate(step: int) -> float:
    """The learning rate after a number of steps, as a share of the highest."""
    return min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))


@torch.no_grad()
def _lengthen(groups: list[HeadGroup], factor: float) -> None:
    """Multiply the weights of heads by a factor."""
    for heads in (heads for group in groups for heads in group.slices):
        weight = heads.parameter()
        heads.put(weight, factor * heads.take(weight))


def _norms(groups: list[HeadGroup]) -> dict[str, float]:
    """Mean norm of a head, for q with k and for v of each kind of attention."""
    norms: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        norms[f"norm/{group.where}/{'v' if group.part == 'v' else 'qk'}"].append(
            float(group.read().norm(dim=-1).mean())
        )
    return {name: statistics.fmean(values) for name, values in norms.items()}


def write_tables(records: Path, results: Path) -> None:
    """Write the tables and figures of all rows that were trained."""
    curves = {ROWS[name].label: points for name in ROWS if (points := read_json(records / f"{name}.json")) is not None}
    first = next(iter(curves.values()))
    length, every = first[0]["length"], first[0]["step"]
    lines = [LEAD.format(length=length)]
    for metric, (title, digits) in TABLES.items():
        body = []
        for label, points in curves.items():
            by_step = {point["step"]: point[metric] for point in points}
            body.append([label, *(f"{by_step[step]:.{digits}f}" if step in by_step else "" for step in AT)])
        head = ["row", *(f"step {step:,}" for step in AT)]
        lines += [title.format(length=length, even=math.log(length), every=every), "", format_table(head, body), ""]
    text = "\n".join(lines)
    save(results / f"{NAME}.md", text)
    print(text)
    charts = [
        learning_curve(
            title,
            {label: [[(point["step"], point[metric]) for point in points]] for label, points in curves.items()},
            f"{NAME}-{metric.replace('/', '-')}",
        )
        for metric, title in DRAWN.items()
    ]
    write_svgs(charts, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("prepared/europarl-160k"), help="prepared data")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="all by default")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two measurements")
    parser.add_argument("--records", type=Path, default=Path(f"results/translation/{NAME}"))
    parser.add_argument("--results", type=Path, default=Path("results/translation"), help="folder of the tables")
    parser.add_argument("--tables", action="store_true", help="train nothing; write the tables from the records")
    arguments = parser.parse_args()
    with errors_in_one_line(parser):
        for name in () if arguments.tables else arguments.rows:
            file = arguments.records / f"{name}.json"
            if file.is_file():
                print(f"{file}: is finished")
                continue
            points = []
            for point in train(ROWS[name], arguments.data, arguments.steps, arguments.every):
                points.append(point)
                print(name, json.dumps({key: round(value, 4) for key, value in point.items()}), flush=True)
            save(file, points)
        if arguments.tables:
            write_tables(arguments.records, arguments.results)


if __name__ == "__main__":
    main()

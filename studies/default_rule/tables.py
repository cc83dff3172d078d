"""Is the default rule safe? Compare it with plain training and write results/default_rule.

    python -m studies.default_rule.tables collect RUNS... --out results/default_rule/runs.json
    python -m studies.default_rule.tables write --folder results/default_rule

`collect` reads folders of `repulsive train` (one for each method, with a folder for each seed) and keeps their test
losses. `write` makes the table from them and from the output of `studies.default_rule.finetune`, which has norms, too.

A rule is called safe if the whole 95 % interval of its loss, relative to plain training with the same seed, is below
0.2 %, and if heads do not grow by more than 10 %. Without a norm the verdict is about the loss alone; the notes below
the table then say where norms were measured.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from pathlib import Path
from typing import Any

from studies.arguments import errors_in_one_line

from repulsive.errors import RunError
from repulsive.metrics import student
from repulsive.safety.markdown import format_table

LIMIT = 0.002  # of the loss
GROWTH = 0.1  # of the norm of heads
RUNS, FINETUNE, TABLE = "runs.json", "finetune.jsonl.xz", "README.md"

Losses = dict[int, float]  # by seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    collect = verbs.add_parser("collect", help="keep the losses of runs")
    collect.add_argument("runs", type=Path, nargs="+", help="SYSTEM=FOLDER: a folder of `repulsive train --seeds`")
    collect.add_argument("--out", type=Path, required=True, help="JSON file to update")
    collect.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="another name for a method")
    write = verbs.add_parser("write", help="write the table")
    write.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    with errors_in_one_line(parser):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Do what the options ask for."""
    if options.verb == "collect":
        stored = json.loads(options.out.read_text()) if options.out.is_file() else {}
        for given in options.runs:
            system, folder = str(given).split("=", 1)
            names = dict(pair.split("=", 1) for pair in options.rename)
            methods = {names.get(method, method): row for method, row in collected(Path(folder)).items()}
            stored.setdefault(system, {}).update(methods)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(stored, indent=1) + "\n")
    else:
        (options.folder / TABLE).write_text(page(systems(options.folder)))


def collected(folder: Path) -> dict[str, dict[str, Any]]:
    """Test losses by seed of every method in a folder of runs.

    Raises:
        RunError: the folder has no results.
    """
    methods: dict[str, dict[str, Any]] = {}
    results = sorted(folder.glob("*/seed-*/result.json"))
    if not results:
        raise RunError(f"{folder}: no METHOD/seed-*/result.json in it; give the folder that holds those of the methods")
    for result in results:
        facts = json.loads(result.read_text())
        method = methods.setdefault(result.parent.parent.name.split("+")[0], {"loss": {}, "seconds": []})
        method["loss"][result.parent.name.removeprefix("seed-")] = facts["test"]["nll"]
        method["seconds"].append(round(facts["seconds"], 1))
    return methods


def systems(folder: Path) -> dict[str, dict[str, tuple[Losses, float | None]]]:
    """Losses by seed, and the growth of heads if it was measured, by system and method."""
    found: dict[str, dict[str, tuple[Losses, float | None]]] = {}
    if (folder / RUNS).is_file():
        for system, methods in json.loads((folder / RUNS).read_text()).items():
            found[system] = {m: ({int(s): v for s, v in row["loss"].items()}, None) for m, row in methods.items()}
    with lzma.open(folder / FINETUNE, "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        system = found.setdefault(f"BERT fine-tuning, {row['task'].upper()}", {})
        losses, _ = system.setdefault(row["rule"], ({}, None))
        losses[row["seed"]] = row["loss"]
    for name, system in found.items():
        for method, (losses, _) in system.items():
            norms = [r["norm"] for r in rows if name.endswith(f", {r['task'].upper()}") and r["rule"] == method]
            system[method] = (losses, statistics.fmean(norms) - 1 if norms else None)
    return found


def relative(losses: Losses, plain: Losses) -> tuple[float, tuple[float, float] | None]:
    """Mean of loss / plain loss - 1 over common seeds, and its 95 % interval."""
    values = [losses[seed] / plain[seed] - 1 for seed in sorted(losses.keys() & plain.keys())]
    return statistics.fmean(values), student.interval(values)


def verdict(interval: tuple[float, float] | None, growth: float | None) -> str:
    """Say whether a rule is safe; by the loss alone if growth is None."""
    if interval is None:
        return "cannot say"
    if interval[0] > LIMIT or (growth is not None and growth > GROWTH):
        return "not safe"
    return "safe" if interval[1] <= LIMIT else "cannot say"


def page(found: dict[str, dict[str, tuple[Losses, float | None]]]) -> str:
    """The table of every system and rule."""
    body = []
    for system, methods in found.items():
        plain = next((losses for name, (losses, _) in methods.items() if name in ("plain", "ma", "europarl-ma")), None)
        for method, (losses, growth) in methods.items():
            cells = [system, method, str(len(losses)), f"{statistics.fmean(losses.values()):.4f}"]
            if plain is None or losses is plain:
                body.append([*cells, "", "", ""])
                continue
            mean, interval = relative(losses, plain)
            text = f"{mean:+.2%}" + (f" [{interval[0]:+.2%}, {interval[1]:+.2%}]" if interval else "")
            body.append([*cells, text, "" if growth is None else f"{growth:+.1%}", verdict(interval, growth)])
    header = ["system", "rule", "seeds", "test loss", "relative to plain", "norm of q and k", "verdict"]
    return f"{INTRODUCTION}\n{format_table(header, body)}\n\n{NOTES}"


INTRODUCTION = """# Is the default rule safe?

Yes, in a small language model, in translation, and in fine-tuning BERT on two tasks: rows "sphere (default)". In a
larger language model the loss stays the same, but with four seeds the interval is too wide to say. In long training of
a larger translator we cannot say either, with two seeds: the NLL rises by 0.39 % [0.02 %, 0.76 %] and norms by 2 %
([the paper's settings](../translation/README.md#the-papers-settings)). The rule "logits" is safe in the small language
model. The loss of a larger one and of fine-tuned BERT rises.

A default must not do harm: the loss must not rise by more than 0.2 % (the whole 95 % interval, paired by seed), and
heads must not grow by more than 10 %. One NVIDIA H200, torch 2.11.0, bf16, 2026-11-17.
"""
NOTES = """- **sphere (default)** is what `repel` does without further settings:
  `SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4)`. The other rows of sphere act in
  every step, with the given ratio.
- **logits** repels attention logits. The rule "logits" does so in the first 500 steps. Acting in one of four steps
  instead (`act_every=4`) loses most of the gain; so does stopping after 30 steps. Rows named after a recipe, and
  "all steps", act in every step of the training.
- *Language model*: `repulsive train lm/europarl-ma lm/europarl-svgd-sphere lm/europarl-logits --seeds 5` with 4 layers
  of 4 heads, width 128, 32 x 256 bytes, 1,500 steps, learning rate 4e-3; `--set method.ratio=0.03`,
  `method.act_every=1`, `method.until=150` and so on for the other rows.
- *Language model, 25M parameters*: `repulsive train lm/europarl-ma lm/europarl-logits --seeds 4 --set
  training.compile=true`, the recipes' own sizes: 8 layers of 8 heads, width 512, 64 x 512 bytes, 1,800 steps, learning
  rate 1e-3, one rate for both. "Default rule" is the same with `lm/europarl-svgd-sphere`, two days later, both methods
  trained again.
- *ELECTRA-small, 45M tokens*: `repulsive train electra/small-ma electra/small-logits --seeds 3` with
  `--set data.steps=920 --set training.epochs=3 --set optimizer.lr=2.5e-4 --set optimizer.bias_correction=true --set
  optimizer.warmup=300 --set training.compile=true`, on the first 13M tokens of a part of Wikipedia. The loss is the NLL
  of the discriminator. Its AUC is still low (0.61 with and without repulsion): this is the start of a pre-training.
- *Translation*: `repulsive train multi30k/ma multi30k/svgd-sphere multi30k/logits --seeds 5` with width 256,
  3 + 3 layers, 30 epochs of 4,096 tokens, learning rate 1e-3, dropout 0.3; `--set method.ratio=0.03` for
  that ratio. With a rate that falls to zero
  (`--set optimizer.schedule=cosine`) runs with the same seed differ less, so that fewer seeds decide. Of 16 seeds,
  nine finished without and eight with a ratio of 0.01 in the time at hand. The default was run with nine seeds later.
  The recipe of Multi30k pads its batches. In packed batches (`packed=true`) the rule "logits" got no tokens at that
  time, and did not act; it does now.
- *BERT fine-tuning*: all-MiniLM-L6-v2, one epoch of 16,000 items, AdamW, learning rate 1e-4, ten seeds, 8,000
  held-out items: `python -m studies.default_rule.finetune train --seeds 10`.
- An empty cell was not measured, and the verdict is about the loss alone. Norms of heads under the default rule,
  relative to plain training, were measured in other runs, and are far from the limit of 10 %:
  - *Language model*: q and k +3.2 %, one seed (CPU, torch 2.13.0, 2026-11-19): `repulsive train lm/europarl-ma
    lm/europarl-svgd-sphere` with the model, learning rate and number of steps of the table, but batches of 8 x 128
    bytes in float32 (`--set training.batch=8 --set data.length=128 --set training.precision=fp32`).
  - *Language model, 25M parameters, default rule*: q and k +1.4 %, v +0.5 %, four seeds: the runs of the table.
  - *Translation*: +2 % after 39,808 updates of a larger model, two seeds
    ([the paper's settings](../translation/README.md#the-papers-settings)). On Multi30k +2 % with a ratio of 0.03 in
    every step, one seed ([question](../translation/question.md)).
  - *Optimizers*: in a smaller language model (two layers, width 32, 200 steps, three seeds) within 0.3 % in every run
    with Adam, AdamW, Adafactor, Muon and schedule-free AdamW, between -1.2 % and +0.02 % with SGD with momentum, and
    between -5.4 % and +2.4 % with plain SGD, which has not converged ([optimizers](../optimizers/tables.md)). With a
    ratio of 0.03 in every step they are within 2 %, and up to 11 % larger with plain SGD.
"""

if __name__ == "__main__":
    main()

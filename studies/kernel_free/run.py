r"""Train every system with the published rule, and with the control that has no kernel.

    repulsive prepare lm-toy
    repulsive prepare age --data age --dev 0.15 --vectors glove.6B.50d.txt --size 50 --half-vectors
    repulsive prepare graphs --data webnlg --out prepared/webnlg
    repulsive prepare pretrain --data WIKIPEDIA --vocabulary vocab.txt             # the first 20 MB are enough
    repulsive prepare translation --data multi30k --most 8000 --out prepared/multi30k
    python -m studies.kernel_free.run

Writes runs.json and tables.md. About an hour of one core; `--systems lm` needs only the generated text and a few
minutes. Finished runs are not repeated: rerun the same command to resume. `--tables` trains nothing and writes the page
from runs.json again, with the row of translation at the paper's settings if that study has results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from studies.arguments import errors_in_one_line
from studies.engine import TimeLimit
from studies.kernel_free.collect import collect
from studies.kernel_free.study import train
from studies.kernel_free.systems import SYSTEMS
from studies.kernel_free.tables import write_page
from studies.output import save

PAPER = Path("results/translation/paper_settings.json")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), help="systems to train")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each system; the cheap ones have five")
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared datasets")
    parser.add_argument("--runs", type=Path, default=Path("runs/kernel_free"), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("results/kernel_free"), help="folder to write")
    parser.add_argument("--limit", type=float, help="seconds; runs that would take longer are not started")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    parser.add_argument("--tables", action="store_true", help="write the page from the stored measurements again")
    options = parser.parse_args(words)
    with errors_in_one_line(parser):
        stored = options.out / "runs.json"
        if not options.tables:
            torch.set_num_threads(1)
            systems = {name: SYSTEMS[name] for name in options.systems}
            train(systems, options.seeds, options.data, options.runs, TimeLimit(options.limit), options.set)
            given = " ".join(["python -m studies.kernel_free.run", *(sys.argv[1:] if words is None else words)])
            about = {"command": given, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
            measured = collect(systems, options.seeds, options.data, options.runs, options.set)
            save(stored, {**about, "systems": measured})
        results = json.loads(stored.read_text())
        save(options.out / "tables.md", write_page(results, results["systems"], PAPER))


if __name__ == "__main__":
    main()

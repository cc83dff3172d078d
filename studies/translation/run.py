"""Effect of repulsion on a translation Transformer: tune every method, then compare them over seeds.

    python -m studies.translation.run --dry-run
    python -m studies.translation.run --stage question tune --data prepared --jobs 12 --limit 540
    python -m studies.translation.run --stage tables --results results/translation

Redundancy (Figure 2) with the settings in results/translation/tuned.json, ten seeds of plain attention and of the
published rule with eight heads; about eight minutes of one H200, of which half is the removal of heads:

    repulsive prepare translation --data multi30k --most 8000 --out prepared/multi30k
    python -m studies.translation.run --stage redundancy tables --tasks multi30k --methods ma --seeds 10 --jobs 10
        --set model.width=256 --set 'model.depth=[3, 3]' --set model.heads=8 --out runs/redundancy --limit 540

Needs prepared/multi30k, prepared/tatoeba and prepared/europarl (`repulsive prepare translation`); a GPU, or `--scale
tiny` for a trial. Writes tables and figures to results/translation.

Stages:
- `question` asks on Multi30k why the published rule slows down training, and which variants do not;
- `tune` searches a grid for every method;
- `final` trains the chosen settings with new seeds;
- `ablation` is the paper's table of attention modules;
- `heads` varies the number of heads;
- `redundancy` trains plain attention, our rule and the published rule, removes one head at a time, then more and more;
- `tables` writes the results so far.

Settings are chosen by the NLL per token of the development set, mean over the tuning seeds. A stage also trains the
grids that it depends on; if only ablation, heads or redundancy are asked for, it uses the settings in
RESULTS/tuned.json instead. Stages share runs with equal settings. Finished runs are not repeated: rerun the same
command to resume after `--limit`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from studies.arguments import common_arguments, errors_in_one_line
from studies.engine import is_finished, train_stages
from studies.translation.measuring_task import make_task
from studies.translation.redundancy import measure_all
from studies.translation.rows import BASELINE, LABELS, MAIN_TASK, SCALES, TASKS
from studies.translation.study import KEPT, STAGES, Translation
from studies.translation.tables import write_tables


def show_plan(studies: Sequence[Translation], stages: Sequence[str]) -> None:
    """Print runs and epochs of every stage, as if the first point of each unfinished grid were chosen."""
    seen: set[Path] = set()
    total = 0.0
    print(f"{'stage':12}{'data':10}{'rows':>6}{'runs':>6}{'new':>6}{'to do':>7}{'epochs':>8}{'alone':>9}")
    for stage in stages:
        for study in (study for study in studies if study.required_runs(stage)):
            specs = study.required_runs(stage)
            new = [spec for folder, spec in specs.items() if folder not in seen]
            missing = [spec for spec in new if not is_finished(spec)]
            epochs = next(iter(specs.values())).recipe.training.epochs
            seconds = len(missing) * epochs * study.scale.seconds[study.task]
            seen, total = seen | set(specs), total + seconds
            counts = f"{len(study.rows(stage)):6}{len(specs):6}{len(new):6}{len(missing):7}{epochs:8}{seconds:7.0f} s"
            print(f"{stage:12}{study.task:10}{counts}")
    print(f"One after the other, without decoding: {total:.0f} s. Runs of an earlier stage are not counted as new.")


def main(words: Sequence[str] | None = None) -> None:
    parser = common_arguments("translation", __doc__, STAGES, list(SCALES))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="datasets")
    parser.add_argument("--methods", nargs="+", default=list(LABELS), choices=list(LABELS), help="besides the baseline")
    parser.add_argument("--more-seeds", type=int, default=2, help="seeds for ablation and heads, numbered from 0")
    parser.add_argument(
        "--transfer",
        action="store_true",
        help=f"tune only {LABELS[BASELINE]} on other datasets; use the settings of {MAIN_TASK} for the rest",
    )
    arguments = parser.parse_args(words)
    stages = [stage for stage in STAGES if stage in arguments.stage]
    end = time.monotonic() + (math.inf if arguments.limit is None else arguments.limit)
    with errors_in_one_line(parser):
        main_study = Translation(MAIN_TASK, arguments)
        studies = [
            main_study if task == MAIN_TASK else Translation(task, arguments, main_study) for task in arguments.tasks
        ]
        if arguments.dry_run:
            show_plan(studies, stages)
            return
        train_stages(studies, stages, arguments, make_task, lambda spec: spec.folder.parents[1].name == KEPT)
        if "redundancy" in stages:
            measure_all(main_study, drop=arguments.drop_weights, jobs=arguments.jobs, end=end)
        if "tables" in arguments.stage:
            write_tables(studies, arguments.results)


if __name__ == "__main__":
    main()

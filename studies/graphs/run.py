"""Effect of repulsion on GraphWriter, which writes texts about graphs: tune every method, then compare them over seeds.

    python -m studies.graphs.run --dry-run
    python -m studies.graphs.run --stage tune final --tasks webnlg --data prepared --jobs 8 --limit 540 --drop-weights
    python -m studies.graphs.run --stage tables --tasks webnlg --data prepared --results results/graphs

Needs prepared/webnlg and prepared/agenda (`repulsive prepare graphs`). Writes tables to results/graphs.

Stages:
- `tune` searches a grid for every method, first for the baseline, then for the others from its settings;
- `final` trains the chosen settings and the published rule with new seeds;
- `tables` writes the results so far.

Training does not need METEOR: runs keep their texts, and `tables` scores them if Java and pycocoevalcap are installed.

Settings are chosen by the NLL per word of the development set, mean over the tuning seeds. Finished runs are not
repeated: rerun the same command to resume after `--limit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from studies.arguments import common_arguments, errors_in_one_line
from studies.engine import is_finished, train_stages
from studies.graphs.rows import LABELS, SCALES, TASKS
from studies.graphs.study import STAGES, Graphs
from studies.graphs.tables import write_tables

from repulsive.errors import DataError
from repulsive.lab.text.folders import read_manifest


def check_data(study: Graphs) -> None:
    """Raise if training and development set are equal: settings could not be chosen on it."""
    files = read_manifest(study.data)["files"]
    if files["train.safetensors"] == files["dev.safetensors"]:
        raise DataError(f"{study.data}: train and dev are the same graphs; prepare data whose parts differ")


def show_plan(studies: Sequence[Graphs], stages: Sequence[str]) -> None:
    """Print runs and epochs of every stage, as if the first point of each unfinished grid were chosen."""
    print(f"{'stage':8}{'data':10}{'rows':>6}{'runs':>6}{'to do':>7}{'epochs':>8}")
    for stage in stages:
        for study in studies:
            specs = list(study.required_runs(stage).values())
            if not specs:
                continue
            missing, epochs = sum(not is_finished(spec) for spec in specs), specs[0].recipe.training.epochs
            print(f"{stage:8}{study.task:10}{len(study.rows(stage)):6}{len(specs):6}{missing:7}{epochs:8}")


def main(words: Sequence[str] | None = None) -> None:
    parser = common_arguments("graphs", __doc__, STAGES, list(SCALES))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="datasets")
    parser.add_argument("--methods", nargs="+", default=list(LABELS), choices=list(LABELS), help="besides the baseline")
    arguments = parser.parse_args(words)
    stages = [stage for stage in STAGES if stage in arguments.stage]
    with errors_in_one_line(parser):
        studies = [Graphs(task, arguments) for task in arguments.tasks]
        if arguments.dry_run:
            show_plan(studies, stages)
            return
        for study in studies if stages else ():
            check_data(study)
        train_stages(studies, stages, arguments)
        if "tables" in arguments.stage:
            write_tables(studies, arguments.results)


if __name__ == "__main__":
    main()

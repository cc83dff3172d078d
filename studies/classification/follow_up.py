"""Follow-up of `paper_sizes` with the settings that it chose: head counts, more controls, entropy, wider searches.

    python -m studies.classification.follow_up --data prepared --out runs/paper_sizes --seconds 530

OUT must hold the records of `paper_sizes` for yelp and age. Parts, in this order:

heads      the paper's Figure 3a: test error with 1 to 40 heads; runs with 30 heads are the final ones of `paper_sizes`
forces     controls with attraction instead of repulsion, and with the force of another head
controls   controls that `paper_sizes` did not reach
entropy    appendix C.5: models of yelp on texts of age. New seeds, so that accuracies are a replication. The first seed
           stores attention maps, as in Figure 1 and appendix D
wide       eight more trials of every arm on age in a wider space; the best point gets final runs if it beats the first
           choice on the development set
strengths  six strengths of every method, and of `kernel-free`, with plain attention's settings; also on snli, if OUT
           has its records; see `strengths`

Parts run seed by seed, so that any number of finished runs is balanced. Records, answers and resuming are those of
`paper_sizes`. `--plan` prints the number of runs and the time that each part needs. `--tables` writes all tables and
figures, also those of `paper_sizes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from studies.altered_forces import ATTRACTION, WRONG_PARTNER
from studies.arguments import errors_in_one_line
from studies.classification.controls import SHORT
from studies.classification.follow_up_tables import write_follow_up
from studies.classification.lean_runs import ENTROPY, HEADS, WIDE_FINAL, Job
from studies.classification.paper_sizes import make_parser, run
from studies.classification.search_space import BASELINE, FIRST, REPELLED, WIDE
from studies.classification.sizes_records import Records, store_labels
from studies.classification.sizes_study import MARGIN, Study
from studies.classification.sizes_tables import write_tables
from studies.classification.strengths import strength_jobs
from studies.tuning.choices import REFINE_SEEDS, REFINED, SCREEN_SEEDS, rank_trials
from studies.tuning.side_by_side import work_folder

from repulsive.lab.engine.runs import versions
from repulsive.lab.paper.result_claims import name_count

DATASETS = ("yelp", "age")
HEAD_COUNTS, HEAD_ARMS = (1, 5, 10, 20, 40), (BASELINE, "svgd", "cosine-smoothing")
HEAD_SEEDS = {"yelp": 3, "age": 10}
FORCES = {  # on yelp only one method is significantly better than plain attention
    "yelp": tuple(f"cosine, {force}" for force in (ATTRACTION, WRONG_PARTNER)),
    "age": tuple(f"{arm}, {force}" for arm in SHORT.values() for force in (ATTRACTION, WRONG_PARTNER)),
}
CONTROLS = {
    "yelp": ("svgd, no repulsion", "ma, longer"),
    "age": ("svgd, no smoothing", "ma@frobenius", "ma, longer"),
}
ENTROPY_SEEDS, OWN_TEXTS, FOREIGN_TEXTS = range(50, 55), "yelp", "age"
SHOWN, SHOWN_ARMS = 6, (BASELINE, "frobenius", "svgd", "cosine-smoothing")
WIDE_DATASET, WIDE_TRIALS = "age", 8
WIDE_SCREEN, WIDE_REFINE = "wide screen", "wide refine"

Studies = Mapping[str, Study]
Jobs = Iterator[tuple[Study, Job]]


def head_jobs(studies: Studies) -> Jobs:
    """Yield runs with other numbers of heads, seed by seed; the stepsize is the number of heads."""
    for seed in range(max(HEAD_SEEDS.values())):
        for dataset, study in studies.items():
            if seed < min(HEAD_SEEDS.get(dataset, 0), study.seeds):
                yield from _head_jobs_of_seed(study, seed)


def _head_jobs_of_seed(study: Study, seed: int) -> Jobs:
    for arm, trial in study.all_chosen().items():
        point = FIRST.trials(arm, study.arguments.trials)[trial]
        counts = HEAD_COUNTS if arm in HEAD_ARMS else ()
        for count in counts if arm == BASELINE else [n for n in counts if n > 1]:  # one head has no partner
            changes = [*point, f"model.heads={count}"]
            changes += [f"method.stepsize={count}"] if arm in REPELLED else []
            name = f"{arm}, {name_count(count)}"
            yield from ((study, job) for job in study.make_jobs(HEADS, arm, trial, changes, [seed], name=name))


def control_jobs(studies: Studies, names: Mapping[str, Sequence[str]]) -> Jobs:
    """Yield controls in the order of seed / number of seeds, so that all datasets end at the same time.

    Args:
        studies: dataset -> its runs.
        names: dataset -> names of controls.
    """
    jobs = []
    for dataset, study in studies.items():
        seeds = len(study.final_seeds())
        jobs += [
            (job.seed / seeds, study, job) for _, job in study.pending_controls() if job.arm in names.get(dataset, ())
        ]
    for _, study, job in sorted(jobs, key=lambda entry: entry[0]):
        yield study, job


def force_jobs(studies: Studies) -> Jobs:
    """Yield the controls with altered forces."""
    return control_jobs(studies, FORCES)


def other_control_jobs(studies: Studies) -> Jobs:
    """Yield the controls that `paper_sizes` did not reach."""
    return control_jobs(studies, CONTROLS)


def entropy_jobs(studies: Studies) -> Jobs:
    """Yield the runs that measure entropy on foreign texts; those of the first seed also store attention."""
    study = studies.get(OWN_TEXTS)
    if study is None:
        return
    foreign = (study.arguments.data / FOREIGN_TEXTS).resolve()
    for seed in ENTROPY_SEEDS[: study.seeds]:
        for arm, trial in study.all_chosen().items():
            shown = SHOWN if seed == ENTROPY_SEEDS[0] and arm in SHOWN_ARMS else 0
            point = FIRST.trials(arm, study.arguments.trials)[trial]
            for job in study.make_jobs(ENTROPY, arm, trial, point, [seed], foreign=foreign, shown=shown):
                yield study, job


def wide_jobs(studies: Studies) -> Jobs:
    """Yield the runs of the wider search, as far as results determine them."""
    study = studies.get(WIDE_DATASET)
    if study is None:
        return
    for trial in range(WIDE_TRIALS):
        for arm in study.all_chosen():
            yield from _wide(study, WIDE_SCREEN, arm, trial, SCREEN_SEEDS)
    for seed in REFINE_SEEDS:
        for arm in study.all_chosen():
            for trial in wide_refined(study, arm):
                yield from _wide(study, WIDE_REFINE, arm, trial, [seed])
    better = {arm: best for arm in study.all_chosen() if (best := wide_chosen(study, arm)) is not None}
    for seed in study.final_seeds():
        for arm, trial in better.items():
            yield from _wide(study, WIDE_FINAL, arm, trial, [seed])


def _wide(study: Study, stage: str, arm: str, trial: int, seeds: Sequence[int]) -> Jobs:
    point = WIDE.trials(arm, WIDE_TRIALS)[trial]
    yield from ((study, job) for job in study.make_jobs(stage, arm, trial, point, seeds))


def wide_refined(study: Study, arm: str) -> list[int]:
    """List the trials of an arm with the lowest NLL in the wider screening; empty until it has ended."""
    runs = study.records.of(study.dataset, WIDE_SCREEN, arm)
    return rank_trials(runs, WIDE_TRIALS * len(SCREEN_SEEDS))[:REFINED]


def wide_chosen(study: Study, arm: str) -> int | None:
    """Return the best trial of the wider search; None until it has ended, or if the first choice is as good."""
    return study.better_than_chosen(arm, WIDE_REFINE, REFINED * len(REFINE_SEEDS))


PARTS: dict[str, Callable[[Studies], Jobs]] = {
    "heads": head_jobs,
    "forces": force_jobs,
    "controls": other_control_jobs,
    "entropy": entropy_jobs,
    "wide": wide_jobs,
    "strengths": strength_jobs,
}


def queue(studies: Studies, parts: Sequence[str]) -> Jobs:
    """Yield all known runs without a record, the most urgent first."""
    for part in parts:
        for study, job in PARTS[part](studies):
            if job.key not in study.records.runs:
                yield study, job


def describe_plan(studies: Studies, parts: Sequence[str], jobs: int) -> str:
    """Describe the number of pending runs of each part and the expected time, from the times of earlier runs.

    Args:
        studies: dataset -> its runs.
        parts: names of parts.
        jobs: runs side by side.
    """
    lines = []
    for part in parts:
        seconds = [study.expected(job) / MARGIN for study, job in queue(studies, [part])]
        more = {"wide": ", and refine and final runs", "strengths": ", and final runs"}.get(part, "")
        lines.append(f"{part}: {len(seconds)} runs{more}, {sum(seconds) / jobs:.0f} s with {jobs} side by side")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, Path("runs/paper_sizes"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="in this order")
    parser.add_argument("--plan", action="store_true", help="print the pending runs of each part, train nothing")
    arguments = parser.parse_args(words)
    with errors_in_one_line(parser):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        records = Records(arguments.out)
        if not arguments.tables:
            with work_folder() as work:
                recorded = {run["dataset"] for run in records.runs.values()}
                names = [name for name in arguments.datasets if name in DATASETS or name in recorded]
                studies = {name: Study(name, arguments, records, work) for name in names}
                for study in studies.values():
                    if not study.has_final:
                        parser.error(
                            f"{arguments.out} has no final runs of {BASELINE} on {study.dataset}; first run "
                            "studies.classification.paper_sizes with the same --out, --arms and --trials"
                        )
                print(describe_plan(studies, arguments.parts, arguments.jobs), flush=True)
                if arguments.plan:
                    return
                records.add({"versions": versions()})
                run(list(studies.values()), records, arguments, work, lambda _: queue(studies, arguments.parts))
            for name in studies:
                store_labels(arguments.data, arguments.out, name)
        answers, results = arguments.out if arguments.tables else None, arguments.results or arguments.out
        runs = list(records.runs.values())
        print(write_tables(runs, records.versions, answers, results))
        print(write_follow_up(runs, records.versions, arguments.out, results, with_items=arguments.tables))


if __name__ == "__main__":
    main()

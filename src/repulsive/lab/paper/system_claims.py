"""Claims on translation, step time, redundant heads, GLUE and texts about graphs.

A row is a call in `ROWS`: a function of this file and its arguments. To add a study of translation whose table
`repulsive.lab.engine.tables` made, add a `partial(translation, ...)`; until its file exists, the row is left out.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

from repulsive.lab.paper.mismatch import OTHER, SMALLER
from repulsive.lab.paper.published import published
from repulsive.lab.paper.result_claims import (
    BLEU,
    HEADS,
    TEXTS,
    TIME,
    Judge,
    ResultClaim,
    gain_of,
    reason_of,
)
from repulsive.lab.paper.result_files import ResultFiles

PUBLISHED, SPHERE = "SVGD, as published", "SVGD"  # labels of rows in our tables of translation
EIGHT_HEADS, FOUR_HEADS = "translation/redundancy.json", "translation/four_heads/redundancy.json"
GROWTH = "heads grow: norm 26.9, plain 6.9"


def translation(
    files: ResultFiles, file: str, row: str, name: str, data: str, why: str = "", *, is_main: bool = False
) -> ResultClaim:
    """BLEU of a row of a table of translation against its first row.

    Args:
        files: the results.
        file: the table, below the folder of results.
        row: label of the row.
        name: of data and rule, in the claim and in the figure.
        data: what was trained on.
        why: reason; "": one that follows from the interval.
        is_main: whether this is a claim of the paper itself.
    """
    paper, ours = gain_of("table2", "iwslt14", "bleu"), files.paired(file, row, "bleu")
    why = why or reason_of(ours, paper)
    return ResultClaim(f"{name}: BLEU rises", paper, ours, data, why, BLEU, name, OTHER, is_main=is_main)


def step_time(files: ResultFiles) -> ResultClaim:
    """Time of a step against that of plain attention."""
    return ResultClaim(
        "a step takes little more time (percent)",
        100 * (published().value("table2", "iwslt14", "svgd", "time") or math.nan) - 100,
        files.step_time(),
        "random tokens, 4,096 a step",
        "one fused update for all projections",
        TIME,
        "all layers",
        digits=1,
        is_limit=True,
        is_main=True,
    )


def removed_heads(
    files: ResultFiles, file: str, heads: int, *, are_harmful: bool, is_main: bool = False
) -> ResultClaim:
    """Share of heads whose removal hardly changes the accuracy, or raises it.

    Args:
        files: the results.
        file: changes in accuracy by method, seed and head, below the folder of results.
        heads: number of heads of an attention module.
        are_harmful: count heads whose removal raises the accuracy.
        is_main: whether this is a claim of the paper itself; the reason then has the models' BLEU.
    """
    counts, which = (
        (_is_harmful, "heads that the model is better without") if are_harmful else (_is_redundant, "redundant heads")
    )
    plain, ours = (files.removed_shares(file, label, counts) for label in ("MA", PUBLISHED))
    why = f"{statistics.fmean(ours):.0f} % of heads, plain {statistics.fmean(plain):.0f} %"
    if is_main:
        models = files.read("translation/redundancy-models.json")
        scores = [statistics.fmean(models[label]["bleu"].values()) for label in (PUBLISHED, "MA")]
        why += "; but BLEU is {:.1f}, plain {:.1f}".format(*scores)
    return ResultClaim(
        f"Multi30k, {heads} heads: fewer {which}",
        None,
        files.removals(file, PUBLISHED, counts),
        f"29K pairs, not WMT14, smaller model, {len(ours)} seeds",
        why,
        HEADS,
        f"{'better without' if are_harmful else 'redundant'}, {heads} heads",
        OTHER,
        digits=0,
        lower=True,
        is_main=is_main,
    )


def _is_redundant(change: float) -> bool:
    return abs(change) < 0.5


def _is_harmful(change: float) -> bool:
    return change > 0


def glue(files: ResultFiles) -> ResultClaim:
    """Mean GLUE score after pre-training."""
    return ResultClaim(
        "GLUE: the mean rises",
        gain_of("table3", "glue", "mean"),
        files.glue("mean"),
        f"150M of 16B tokens, {files.pretrainings()}",
        "two pre-trainings of one recipe differ by up to 2.2",
        BLEU,
        "GLUE, mean",
        SMALLER,
        is_main=True,
    )


def texts(files: ResultFiles, name: str, file: str, data: str, other_data: str, why: str = "") -> ResultClaim:
    """BLEU-4 of texts about graphs; without a reason, the difference of the published settings."""
    paper = gain_of("table4", "agenda", "bleu", "rma", "gw")
    why = why or f"as published {files.paired(file, 'GW + RMA, as published', 'bleu').text(2)}"
    ours, claim = files.paired(file, "GW + RMA", "bleu"), f"{name}: better texts (BLEU-4)"
    return ResultClaim(claim, paper, ours, data, why, BLEU, name, other_data, is_main=True)


def module(files: ResultFiles, row: str, table_row: str, what: str) -> ResultClaim:
    """BLEU with the published rule in some of the attention modules, against plain attention."""
    ours = files.paired("translation/ablation.json", row, "bleu")
    paper = gain_of("modules", "iwslt14", "bleu", table_row)
    claim, data = f"Multi30k, {what}: BLEU rises", "29K pairs, not IWSLT14, smaller model, 2 seeds"
    why = "" if ours.high < 0 else "with two seeds no difference can be significant"
    return ResultClaim(claim, paper, ours, data, why, BLEU, f"… {what}".replace("-attention", ""), OTHER)


def against_disagreement(files: ResultFiles) -> ResultClaim:
    """BLEU of the published rule against the disagreement penalty of Li et al. (2018)."""
    ours = files.unpaired("translation/multi30k.json", PUBLISHED, "bleu", other="MA + R")
    paper = gain_of("table2", "iwslt14", "bleu", "svgd", "disagreement")
    data = "29K pairs, not IWSLT14, smaller model, 3 seeds"
    claim, title = "Multi30k, as published: better than the penalty of disagreement", "Multi30k - disagreement"
    return ResultClaim(claim, paper, ours, data, f"{GROWTH} (one seed)", BLEU, title, OTHER)


def text_metric(files: ResultFiles, metric: str, key: str, *, lower: bool = False) -> ResultClaim:
    """A metric of texts about graphs of AGENDA, against plain attention."""
    ours = files.unpaired("graphs/agenda.json", "GW + RMA", metric, other="GW")
    paper = gain_of("table4", "agenda", key, "rma", "gw")
    claim, data = f"AGENDA: {'lower' if lower else 'higher'} {metric}", "800 of 38,720 graphs, 3 seeds"
    why = "seeds differ by more than methods"
    return ResultClaim(claim, paper, ours, data, why, TEXTS, f"AGENDA, {metric}", SMALLER, lower=lower)


ROWS: tuple[Judge, ...] = (
    partial(
        translation,
        file="translation/paper_settings.json",
        row="published",
        name="Europarl, paper's size",
        data="160K pairs, not IWSLT14, 39,808 updates, 2 seeds",
        why="the encoder's tokens become equal (one seed)",
        is_main=True,
    ),
    partial(
        translation,
        file="translation/paper_settings.json",
        row="recommended (sphere)",
        name="Paper's size, sphere",
        data="160K pairs, not IWSLT14, 39,808 updates, 2 seeds",
    ),
    partial(
        translation,
        file="translation/multi30k.json",
        row=PUBLISHED,
        name="Multi30k, as published",
        data="29K pairs, not IWSLT14, smaller model, 3 seeds",
        why=f"{GROWTH} (one seed)",
    ),
    partial(
        translation,
        file="translation/tatoeba.json",
        row=PUBLISHED,
        name="Tatoeba, as published",
        data="164K pairs, not IWSLT14, smaller model, 3 seeds",
        why="agrees with Multi30k",
    ),
    partial(
        translation,
        file="translation/europarl.json",
        row=PUBLISHED,
        name="Europarl, as published",
        data="320K pairs, not IWSLT14, smaller model, 3 seeds",
        why=f"{GROWTH} (Multi30k)",
    ),
    partial(
        translation,
        file="translation/multi30k.json",
        row=SPHERE,
        name="Multi30k, on the sphere",
        data="29K pairs, not IWSLT14, smaller model, 3 seeds",
    ),
    partial(
        translation,
        file="translation/tatoeba.json",
        row=SPHERE,
        name="Tatoeba, on the sphere",
        data="164K pairs, not IWSLT14, smaller model, 3 seeds",
    ),
    partial(
        translation,
        file="translation/europarl.json",
        row=SPHERE,
        name="Europarl, on the sphere",
        data="320K pairs, not IWSLT14, smaller model, 3 seeds",
    ),
    against_disagreement,
    *(
        partial(module, row=f"RMA ({label})", table_row=name, what=what)
        for label, name, what in (
            ("Q", "q", "q alone"),
            ("K", "k", "k alone"),
            ("V", "v", "v alone"),
            ("En", "encoder", "encoder alone"),
            ("De", "decoder", "decoder alone"),
            ("En-De", "cross", "cross-attention alone"),
            ("first layer", "first", "first layer alone"),
            ("last layer", "last", "last layer alone"),
        )
    ),
    step_time,
    partial(removed_heads, file=EIGHT_HEADS, heads=8, are_harmful=False, is_main=True),
    partial(removed_heads, file=EIGHT_HEADS, heads=8, are_harmful=True),
    partial(removed_heads, file=FOUR_HEADS, heads=4, are_harmful=False),
    partial(removed_heads, file=FOUR_HEADS, heads=4, are_harmful=True),
    glue,
    partial(
        texts,
        name="AGENDA",
        file="graphs/agenda.json",
        data="800 of 38,720 graphs, 3 seeds",
        other_data=SMALLER,
        why="seeds differ by more than methods",
    ),
    partial(
        texts,
        name="WebNLG, tuned",
        file="graphs/webnlg.json",
        data="18K texts, not AGENDA, 3 seeds",
        other_data=OTHER,
    ),
    *(
        partial(text_metric, metric=metric, key=key, lower=lower)
        for metric, key, lower in (
            ("METEOR 1.5", "METEOR", False),
            ("ROUGE-L", "ROUGE-L", False),
            ("entity coverage", "entity coverage", False),
            ("repeated clauses", "repeated clauses", True),
        )
    ),
)

"""The paper's numbers: sums and means, claims against the printed tables, and known inconsistencies."""

import itertools

import pytest

from repulsive.lab.paper.catalogue import ARTEFACTS
from repulsive.lab.paper.datasets import DATASETS
from repulsive.lab.paper.method_tables import TABLES
from repulsive.lab.paper.published import published
from repulsive.lab.systems.glue.data import TASKS

VALUES = published().tree["values"]
EXTRA = {"table2": {"big"}, "table3": set(VALUES["table3"]["glue"])}  # rows the paper quotes from others
OURS = {"sgld-tempered", "spos-tempered"}  # rows of tables that the paper does not have
# Metrics of claims for which the paper prints no numbers, only a figure or a sentence.
UNPRINTED = {
    "entity coverage",
    "repeated clauses",
    "overlap",
    "redundant heads",
    "heads better away",
    "error",
    "error at every number",
    "ece15",
    "oe15",
    "foreign entropy",
}


def numbers(artefact):
    """(data, row, metric) -> number."""
    tables = {data: rows for data, rows in VALUES[artefact].items() if isinstance(rows, dict)}
    return {(d, r, m): float(x) for d, rows in tables.items() for r, cells in rows.items() for m, x in cells.items()}


def all_claims():
    return [claim for name in ARTEFACTS for claim in published().claims(name)]


@pytest.mark.parametrize(
    ("system", "after"),
    [*((system, False) for system in VALUES["table3"]["glue"]), ("ma", True), ("svgd", True)],
)
def test_printed_glue_means_are_means_of_the_tasks(system, after):
    cells = VALUES["table3"]["glue"][system]
    scores = [cells["rte-mnli" if task == "rte" and after else task] for task in TASKS]
    assert sum(scores) / 8 == pytest.approx(cells["mean-mnli" if after else "mean"], abs=0.0501)


def test_judgements_add_up_to_100_percent():
    assert [sum(cells.values()) for cells in VALUES["table5"]["agenda"].values()] == [100] * 4


def test_only_six_of_eight_glue_tasks_improve():
    rows = VALUES["table3"]["glue"]
    better = [task for task in TASKS if rows["svgd"][task] > rows["ma"][task]]
    assert len(better) == 6 and set(TASKS) - set(better) == {"sst", "rte"}
    assert any("six by the paper's own table" in note for note in published().notes("table3"))


def test_the_one_number_printed_twice_differently_is_noted():
    seen: dict[tuple[str, str, str], set[float]] = {}
    for artefact in VALUES:
        for key, value in numbers(artefact).items():
            seen.setdefault(key, set()).add(value)
    twice = {key: values for key, values in seen.items() if len(values) > 1}
    assert twice == {("yelp", "svgd", "accuracy"): {71.2, 71.7}}
    for artefact in ("table1", "priors"):
        assert any("71.2" in note and "71.7" in note for note in published().notes(artefact))


def test_claims_agree_with_the_printed_numbers_unless_marked_as_contradicted():
    checked = 0
    for claim in all_claims():
        gain = claim.gain
        if gain is None:
            assert claim.metric in UNPRINTED, claim
            continue
        holds = {"higher": gain > 0, "lower": gain < 0, "same": abs(gain) <= claim.within}
        assert holds[claim.better] != claim.contradicted, claim
        checked += 1
    assert checked >= 80


def test_gains_of_every_kind_of_table():
    gains = {(c.artefact, c.data, c.first, c.second, c.metric): c.gain for c in all_claims()}
    assert gains["table1", "yelp", "svgd", "ma", "accuracy"] == pytest.approx(71.2 - 69.3)
    assert gains["table3", "mean", "svgd", "ma", "score"] == pytest.approx(0.3)
    assert gains["table5", "agenda", "win", "lose", "overall"] == 65 - 14


def test_entries_name_existing_artefacts_rows_and_datasets():
    tables = {table.id: table for table in TABLES}
    assert set(VALUES) <= set(ARTEFACTS)
    for entry in itertools.chain(published().tree["claims"], published().tree["notes"]):
        assert set(entry.get("artefacts", [entry.get("artefact")])) <= set(ARTEFACTS)
    for name, table in tables.items():
        assert {data for data, _, _ in numbers(name)} == set(table.paper_datasets)
        assert {row for _, row, _ in numbers(name)} - EXTRA.get(name, set()) == set(table.methods) - OURS
        for claim in published().claims(name):
            assert claim.data in table.paper_datasets and {claim.first, claim.second} <= set(table.methods)
    assert set(published().tree["datasets"]) == {data.name for data in DATASETS.values() if not data.stands_for}


def test_every_number_has_a_source_and_every_artefact_but_the_sample_a_claim():
    assert all(published().source(name) for name in VALUES)
    assert all(entry["source"] for entry in published().tree["claims"])
    assert [name for name in ARTEFACTS if not published().claims(name)] == ["sample"]

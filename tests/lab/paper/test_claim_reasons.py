"""The reasons beside the claims state numbers of the committed results."""

import json
import statistics
from pathlib import Path

import pytest

from repulsive.lab.paper import published as tables
from repulsive.lab.paper.all_claims import judge_claims
from repulsive.lab.paper.result_files import ResultFiles

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture(scope="module")
def files():
    return ResultFiles(RESULTS)


@pytest.fixture(scope="module")
def why(files):
    return {row.claim: row.why for row in judge_claims(files)[0]}


def published(data, row):
    return tables.published().value("table1", data, row, "dist")


def means(files, data, metric):
    return {name: arm["test"][metric]["mean"] for name, arm in files.summary(data)["arms"].items() if "test" in arm}


def test_overlap_of_heads(files, why):
    overlap = means(files, "yelp", "overlap")
    assert why["Yelp, SVGD: more accurate"].endswith(f"{overlap['svgd']:.2f}, plain {overlap['ma']:.2f}")
    assert why["Yelp, SPOS: more accurate"].endswith(f"{overlap['spos']:.2f}")
    svgd, plain = (files.row("classification/snli.json", name)["cells"]["overlap"]["mean"] for name in ("SVGD", "MA"))
    assert why["SNLI, smaller model, SVGD: more accurate"].endswith(f"{svgd:.2f}, plain {plain:.2f}")
    overlap = means(files, "snli", "overlap")
    assert why["SNLI, SPOS: more accurate"].endswith(f"{overlap['spos']:.2f}, plain {overlap['ma']:.2f}")


@pytest.mark.parametrize(("control", "name"), [("svgd@ma", "SVGD"), ("cosine@ma", "cosine kernel")])
def test_a_method_at_the_settings_of_plain_attention(control, name, files, why):
    found = files.summary("snli")["controls"][control]["against_plain"]["accuracy"]["difference"]
    assert f"plain attention's settings {100 * found:+.2f} [" in why[f"SNLI, {name}: more accurate"]


def test_dist(files, why):
    paper = 1.602 - 0.246
    svgd, cosine = (100 * files.sizes("yelp", arm, "dist").mean / paper for arm in ("svgd", "cosine-smoothing"))
    stated = why["Yelp, SVGD: heads are more diverse (Dist)"]
    assert stated.startswith(f"{svgd:.0f} %") and stated.endswith(f"{cosine:.0f} %")
    assert why["Age, SVGD: heads are more diverse (Dist)"].endswith(f"Dist {means(files, 'age', 'dist')['ma']:.2f}")
    found = files.sizes("snli", "svgd", "dist").mean / (published("snli", "svgd") - published("snli", "ma"))
    same = files.sizes("snli", "svgd", "dist", "ma@svgd").mean
    stated = why["SNLI, SVGD: heads are more diverse (Dist)"]
    assert stated.startswith(f"{100 * found:.0f} %") and stated.endswith(f"; {same:.2f} at the same settings")


def test_calibration(files, why):
    for metric, scaled, words in (("ece15", "", " to "), ("scaled_ece15", " after temperature scaling", " or ")):
        errors = [f"{100 * error:.1f}" for error in means(files, "yelp", metric).values()]
        assert f"{min(errors)}{words}{max(errors)}" in why[f"Yelp, SVGD: better calibrated{scaled} (ECE)"]
    nll = files.paired("classification/snli.json", "SVGD", "nll").mean
    assert why["SNLI, smaller model, SVGD: better calibrated (ECE)"].endswith(f"{nll:.3f}")
    errors = [100 * means(files, "snli", metric)["ma"] for metric in ("ece15", "scaled_ece15")]
    stated = why["SNLI, SVGD: better calibrated after temperature scaling (ECE)"]
    assert stated.endswith("from {:.1f} to {:.1f}".format(*errors))
    same = files.sizes("snli", "svgd", "ece15", "ma@svgd")  # "so the difference comes from the settings"
    assert same.low < 0 < same.high and same.text(2) in why["SNLI, SVGD: better calibrated (ECE)"]


def test_a_wider_search_counts_if_it_found_better_settings(files, why):
    """The row is that of the search with the lowest NLL on the development set; the other is in the reason."""
    for arm, row in files.read("classification/second_round/follow_up.json")["wide, age"].items():
        assert (row["wide"]["nll"] < row["first"]["nll"]) == (arm == "spos") == ("against" in row)
    assert why["Age, SPOS: more accurate"].endswith(files.sizes("age", "spos", "accuracy").text(2))


def test_wrong_partners_give_about_half(files):
    """The pages say so, and that these gains are not significant."""
    for data in ("yelp", "age"):
        gain = files.sizes(data, "cosine-smoothing", "accuracy").mean
        assert files.control_minus_plain(data, "cosine, wrong partner", "accuracy").low < 0
        assert 0.4 < 1 - files.sizes(data, "cosine-smoothing", "accuracy", "cosine, wrong partner").mean / gain < 0.6


def test_norms_and_redundant_heads(files, why):
    norms = {row["label"]: row["norm"][0] for row in files.read("translation/question.json")}
    grown = f"norm {norms['SVGD, as published']:.1f}, plain {norms['MA']:.1f}"
    assert all(grown in why[f"{data}, as published: BLEU rises"] for data in ("Multi30k", "Europarl"))
    for folder, heads in (("translation", 8), ("translation/four_heads", 4)):
        changes = files.read(f"{folder}/redundancy.json")
        shares = {
            name: 100 * statistics.fmean(abs(x) < 0.5 for seed in changes[name].values() for x in seed)
            for name in ("SVGD, as published", "MA")
        }
        stated = f"{shares['SVGD, as published']:.0f} % of heads, plain {shares['MA']:.0f} %"
        assert why[f"Multi30k, {heads} heads: fewer redundant heads"].startswith(stated)


def test_models_with_fewer_redundant_heads_are_worse(files, why):
    """The reason says so beside the verdict, because a model that has learned less needs all that it has."""
    models = files.read("translation/redundancy-models.json")
    bleu, plain = (models[name]["bleu"] for name in ("SVGD, as published", "MA"))
    assert max(bleu.values()) < min(plain.values()) - 20
    means = [sum(scores.values()) / len(scores) for scores in (bleu, plain)]
    stated = why["Multi30k, 8 heads: fewer redundant heads"]
    assert stated.endswith("; but BLEU is {:.1f}, plain {:.1f}".format(*means))


def test_pre_trainings(files, why):
    systems = json.loads((RESULTS / "pretraining" / "glue.json").read_text())["systems"]
    scores = [list(system["values"]["mean"].values()) for system in systems.values()]
    assert why["GLUE: the mean rises"].endswith(f"{max(max(each) - min(each) for each in scores):.1f}")

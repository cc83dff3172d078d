"""The reasons beside the claims state numbers of the committed results."""

import json
import statistics
from pathlib import Path

import pytest

from repulsive.lab.paper.all_claims import judge_claims
from repulsive.lab.paper.result_files import ResultFiles

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture(scope="module")
def files():
    return ResultFiles(RESULTS)


@pytest.fixture(scope="module")
def why(files):
    return {row.claim: row.why for row in judge_claims(files)[0]}


def means(files, data, metric):
    return {name: arm["test"][metric]["mean"] for name, arm in files.summary(data)["arms"].items() if "test" in arm}


def test_overlap_of_heads(files, why):
    overlap = means(files, "yelp", "overlap")
    assert why["Yelp, SVGD: more accurate"].endswith(f"{overlap['svgd']:.2f}, plain {overlap['ma']:.2f}")
    assert why["Yelp, SPOS: more accurate"].endswith(f"{overlap['spos']:.2f}")
    svgd, plain = (files.row("classification/snli.json", name)["cells"]["overlap"]["mean"] for name in ("SVGD", "MA"))
    assert why["SNLI, SVGD: more accurate"].endswith(f"{svgd:.2f}, plain {plain:.2f}")


def test_dist(files, why):
    paper = 1.602 - 0.246
    svgd, cosine = (100 * files.sizes("yelp", arm, "dist").mean / paper for arm in ("svgd", "cosine-smoothing"))
    stated = why["Yelp, SVGD: heads are more diverse (Dist)"]
    assert stated.startswith(f"{svgd:.0f} %") and stated.endswith(f"{cosine:.0f} %")
    assert why["Age, SVGD: heads are more diverse (Dist)"].endswith(f"Dist {means(files, 'age', 'dist')['ma']:.2f}")
    dist = {row["label"]: row["cells"]["dist"]["mean"] for row in files.read("classification/snli.json")["rows"]}
    controls = [value for label, value in dist.items() if label.startswith("control")]
    assert len(controls) == 2 and max(controls) < dist["MA"]  # "two controls do not raise it"


def test_calibration(files, why):
    for metric, scaled, words in (("ece15", "", " to "), ("scaled_ece15", " after temperature scaling", " or ")):
        errors = [f"{100 * error:.1f}" for error in means(files, "yelp", metric).values()]
        assert f"{min(errors)}{words}{max(errors)}" in why[f"Yelp, SVGD: better calibrated{scaled} (ECE)"]
    nll = files.paired("classification/snli.json", "SVGD", "nll").mean
    assert why["SNLI, SVGD: better calibrated (ECE)"].endswith(f"{nll:.3f}")


def test_wrong_partners_give_about_half(files):
    for data in ("yelp", "age"):
        gain = files.sizes(data, "cosine-smoothing", "accuracy").mean
        assert 0.4 < 1 - files.sizes(data, "cosine-smoothing", "accuracy", "cosine, wrong partner").mean / gain < 0.6


def test_norms_and_redundant_heads(files, why):
    norms = {row["label"]: row["norm"][0] for row in files.read("translation/question.json")}
    grown = f"norm {norms['SVGD, as published']:.1f}, plain {norms['MA']:.1f}"
    assert all(grown in why[f"{data}, as published: BLEU rises"] for data in ("Multi30k", "Europarl"))
    changes = files.read("translation/redundancy.json")
    shares = {
        name: 100 * statistics.fmean(abs(x) < 0.5 for seed in changes[name].values() for x in seed)
        for name in ("SVGD, as published", "MA")
    }
    stated = why["Multi30k: fewer redundant heads"]
    assert stated.startswith(f"{shares['SVGD, as published']:.0f} %") and stated.endswith(f"{shares['MA']:.0f} %")


def test_pre_trainings(files, why):
    systems = json.loads((RESULTS / "pretraining" / "glue.json").read_text())["systems"]
    scores = [list(system["values"]["mean"].values()) for system in systems.values()]
    assert why["GLUE: the mean rises"].endswith(f"{max(max(each) - min(each) for each in scores):.1f}")

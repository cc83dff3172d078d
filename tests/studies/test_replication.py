"""Tables, figures and sentences of the replication pages agree with the files in results/."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("replication.md", "replication-details.md")
INTERVAL = re.compile(r"([+-]?\d+\.\d+) \[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")


@pytest.fixture(scope="module")
def replication():
    with study("studies.replication") as module:
        yield module


def test_pages_and_figures_are_up_to_date(replication, tmp_path, capsys):
    assert replication.main(["--check"]) == 0, capsys.readouterr().out
    (tmp_path / "pictures").mkdir()
    for path in replication.make_files(replication.DOCS):
        shutil.copy(path, tmp_path / path.relative_to(replication.DOCS))
    page = tmp_path / "replication.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| cannot say |", "| holds |", 1), encoding="utf-8")
    (tmp_path / "pictures" / "replication-details.svg").unlink()
    assert replication.main(["--check"], tmp_path) == 1
    assert "out of date: replication.md, replication-details.svg; run" in capsys.readouterr().out
    assert replication.main([], tmp_path) == 0 and replication.main(["--check"], tmp_path) == 0


def test_every_interval_of_the_text_is_in_a_table(replication):
    """The pages state decreases as positive numbers; tables have the opposite sign and more digits."""
    tables = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "results").rglob("*.md"))
    measured = {tuple(map(float, match.groups())) for match in INTERVAL.finditer(tables)}
    measured |= {(-mean, -high, -low) for mean, low, high in measured}
    stated = []
    for name in PAGES:
        before, _, rest = (ROOT / "docs" / name).read_text(encoding="utf-8").partition(replication.BEGIN)
        stated += INTERVAL.findall(" ".join((before + rest.partition(replication.END)[2]).split()))
    assert len(stated) >= 3
    for words in stated:
        limits = [0.5 * 10.0 ** -len(word.partition(".")[2]) + 1e-9 for word in words]
        own = [float(word) for word in words]
        assert any(
            all(abs(a - b) <= limit for a, b, limit in zip(own, other, limits, strict=True)) for other in measured
        ), words


def test_the_seeds_behind_the_redundant_heads():
    """The page says that with four heads those that the model is better without belong to one seed."""
    changes = json.loads((ROOT / "results" / "translation" / "four_heads" / "redundancy.json").read_text())
    counts = {name: sorted(sum(x > 0 for x in seed) for seed in seeds.values()) for name, seeds in changes.items()}
    assert counts["MA"] == [2, 5, 6] and counts["SVGD, as published"] == [0, 0, 7]


def test_the_gains_of_two_rounds():
    page = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
    folder = ROOT / "results" / "classification"
    for arm, sentence in (
        ("svgd", "{} points in one round of 28 seeds, {} in another of 40"),
        ("cosine-smoothing", "{} and {}"),
    ):
        gains = []
        for rounds in ("paper_sizes.json", "second_round/paper_sizes.json"):
            summary = json.loads((folder / rounds).read_text())["age"]["arms"][arm]
            gains.append(f"{100 * summary['against_plain']['accuracy']['difference']:.2f}")
        assert sentence.format(*gains) in page


def test_the_errors_by_number_of_heads():
    """The pages say that errors on Yelp are higher beyond 10 heads (plain) or 20 (SVGD), and where the NLL stays."""
    found = json.loads((ROOT / "results" / "classification" / "second_round" / "follow_up.json").read_text())
    means = {
        metric: {
            arm: {int(heads): sum(seeds.values()) / len(seeds) for heads, seeds in row.items()}
            for arm, row in found["heads, yelp"][metric].items()
        }
        for metric in ("accuracy", "nll")
    }
    for arm, last in (("ma", 10), ("svgd", 20)):
        few = [error for heads, error in means["accuracy"][arm].items() if heads <= last]
        many = [error for heads, error in means["accuracy"][arm].items() if heads > last]
        assert max(few) - min(few) < 0.2 and min(many) > max(few)
    page = " ".join((ROOT / "docs" / "replication-details.md").read_text(encoding="utf-8").split())
    cosine, plain, svgd = (means["nll"][arm] for arm in ("cosine-smoothing", "ma", "svgd"))
    assert f"stays between {min(cosine.values()):.3f} and {max(cosine.values()):.3f} from 5 to 40" in page
    assert f"rises from {plain[5]:.3f} to {plain[40]:.3f}" in page and f"rises to {svgd[40]:.3f}" in page


def test_names_of_rows_fit_beside_the_axis():
    """A character is about 6.1 pixels wide; names end at x = 158, and the picture has a margin of 8."""
    for picture in (ROOT / "docs" / "pictures").glob("replication*.svg"):
        names = re.findall(r'<text x="158" [^>]*text-anchor="end">([^<]*)<', picture.read_text(encoding="utf-8"))
        assert len(names) > 5 and max(map(len, names)) * 6.1 <= 150, picture.name

"""`repulsive report` on the command line: pages, numbers of heads, labels, mistakes, and texts with markup."""

import html
import re
import shutil

import pytest

from repulsive.errors import ConfigError
from repulsive.lab.runs.head_counts import grouped, heads_of
from repulsive.lab.runs.load import open_methods
from repulsive.lab.runs.report import Options, gather
from repulsive.lab.systems.registry import open_recipe
from repulsive.pages.figures import write as figures
from tests.lab.runs.reported_runs import EVIL, results, train
from tests.pages.browser import needs_browser, open_page


def test_the_verb_writes_the_page(repulsive, place):
    out = repulsive(
        "report",
        "ma",
        "svgd",
        "--part",
        "dev",
        "--most",
        10,
        "--out",
        "seen/page.html",
        "--title",
        "Two ways",
        "--device",
        "cpu",
    )
    assert "seen/page.html" in out
    page = (place / "seen" / "page.html").read_text()
    assert "<h1>Two ways</h1>" in page and "development set" in page and len(page.encode()) < 5_000_000
    assert "on 10 items of the development set" in page


def test_how_many_heads(repulsive, place):
    out = repulsive("report", "--heads", "ma-2", "ma", "ma-1", "--out", "heads.html", "--figures", "figures")
    assert "heads.html" in out and "figures" in out
    names = {f"heads-{metric}.{end}" for metric in ("accuracy", "nll") for end in ("svg", "pdf")}
    assert {path.name for path in (place / "figures").iterdir()} == names
    page = (place / "heads.html").read_text()
    table = re.search(r'<table class="sheet">(.*?)</table>', page, re.S)[1]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[2:]]
    assert [row[:3] for row in rows] == [["MA", "1", "2"], ["MA", "2", "1"], ["MA", "3", "2"]]
    error = 100 * (1 - sum(results(place, "ma", "accuracy")) / 2)
    assert rows[2][3].startswith(f"{error:.3f} [") and "[" not in rows[1][3]  # one seed has no interval
    assert page.count('class="fit m0"') == 2 and "M*" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data"], "is neither a run nor a folder of runs"),
        (["nowhere"], "is neither a run nor a folder of runs"),
        (["ma", "unfinished"], "no run here has finished"),
        (["ma", "evil"], "other data"),
        (["ma", "ma"], "given twice"),
        (["ma", "--part", "train"], "was not evaluated on part 'train'; it was on dev, test"),
        (["--heads", "ma", "ma-1", "--part", "talks"], "was not evaluated on part 'talks'; it was on dev, test"),
        (["ma", "--foreign", "data"], "is what the runs were trained on"),
        (["ma", "--foreign", "pairs"], "pairs of sentences"),
        (
            ["ma", "--foreign", "hostile", "--part", "talks"],
            "has no part 'talks'; choose one of train, dev, test",
        ),
        (["ma", "--foreign", "nowhere"], "nothing prepared here"),
        (["ma", "--device", "tpu"], "choose cpu or cuda"),
        (["ma", "--out", "data/manifest.json/page.html", "--most", "1", "--device", "cpu"], "choose another --out"),
        (["ma", "--out", "data"], "is a folder"),
        (["--heads", "ma", "svgd"], "differ only in model.heads"),
        (["--heads", "ma", "copied"], "the same recipe with 3 heads"),
        (["--heads", "ma", "ma-1", "--foreign", "hostile"], "not both"),
        (["--heads", "ma", "ma-1", "--bleu"], "--heads or --bleu, not both"),
        (["ma", "--bleu", "--device", "cpu"], "these runs do not translate"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_end_with_one_line(repulsive, place, words, message):
    if not (place / "unfinished").exists():
        shutil.copytree(place / "ma/seed-0", place / "unfinished/seed-0")
        (place / "unfinished/seed-0/result.json").unlink()
        shutil.copytree(place / "ma", place / "copied")
    assert message in repulsive("report", *words, code=2)


def test_without_matplotlib_nothing_is_measured_first(repulsive, monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    assert "[report]'" in repulsive("report", "ma", "--figures", "f", "--out", "never.html", code=2)


def test_seeds_that_have_not_ended_are_left_out_and_told(place):
    folder = place / "half"
    shutil.copytree(place / "ma", folder)
    (folder / "seed-1" / "result.json").unlink()
    content = gather([folder], Options(most=5, device="cpu"))
    assert "left out: seed 1 of MA" in content.lead and "1 seed each" in content.lead


def test_methods_of_one_label_are_told_apart(place):
    first, second = open_methods([place / "ma", place / "ma-2"])
    assert (first.label, second.label) == ("MA (ma)", "MA (ma-2)")
    with pytest.raises(ConfigError, match="not both"):
        Options(heads=True, foreign=place)


def test_texts_labels_and_classes_are_shown_never_markup(repulsive, place):
    repulsive("report", "evil", "--out", "evil.html", "--device", "cpu")
    page = (place / "evil.html").read_text()
    assert page.count("<script") == 2 and "<img" not in page
    assert html.escape(EVIL) in page and html.escape(f"</script>{EVIL}") in page


@needs_browser
def test_hostile_runs_open_without_a_word_on_the_console(repulsive, place):
    repulsive("report", "evil", "--out", "opened.html", "--device", "cpu")
    seen = open_page(place / "opened.html", "example=2&view=heads")
    assert seen.console == [] and "broken into" not in seen.dom.split("</title>")[0]
    assert 'data-view="heads"' in seen.dom and re.findall(r'id="example-(\d)" open', seen.dom) == ["2"]


def test_groups_of_one_label_say_in_what_they_differ(place):
    changes = {"optimizer.lr": 0.02, "training.epochs": 1}
    train(place, "other-lr/seed-0", "reviews/ma", "data", heads=2, **changes)
    groups = grouped(open_methods([place / "ma", place / "ma-1", place / "other-lr"]))
    lr = open_recipe("reviews/ma").optimizer.lr
    ours, theirs = f"optimizer.lr = {lr}, training.epochs = 2", "optimizer.lr = 0.02, training.epochs = 1"
    assert list(groups) == [f"MA ({ours})", f"MA ({theirs})"]
    assert [[heads_of(method) for method in each] for each in groups.values()] == [[1, 3], [2]]

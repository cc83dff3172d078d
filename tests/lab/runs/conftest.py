"""Runs to report on, the command line in their folder, and a report of two methods."""

import json

import pytest

from repulsive.cli import main
from repulsive.lab.runs.report import Options, gather
from repulsive.lab.systems.datasets import prepare
from tests.lab.runs.reported_runs import EVIL, RUNS, train, write_tsv


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Two methods with two seeds, a third of other numbers of heads, hostile texts, and pairs of sentences."""
    folder = tmp_path_factory.mktemp("report")
    prepare("reviews", None, folder / "data", train=120, dev=40, test=60)
    for seed in (0, 1):
        train(folder, f"ma/seed-{seed}", "reviews/ma", "data", seed=seed)
        train(folder, f"svgd/seed-{seed}", "reviews/svgd", "data", seed=seed)
        train(folder, f"ma-1/seed-{seed}", "reviews/ma", "data", heads=1, seed=seed)
    train(folder, "ma-2/seed-0", "reviews/ma", "data", heads=2)
    bad, good = f"bad <script>{RUNS}</script> food </script>", "good & cheap <b>food</b> &lt; here"
    write_tsv(folder / "raw-tsv", ["label", "text"], [[EVIL, bad], ["fine", good]])
    prepare("tsv", folder / "raw-tsv", folder / "hostile", tokenizer="regex", label="label", text="text", jobs=1)
    train(folder, "evil/seed-0", "reviews/ma", "hostile", label=json.dumps(f"</script>{EVIL}"))
    pairs = [["entailment", "a man runs", "he moves"], ["neutral", "a man runs far", "he is tall"]]
    pairs.append(["contradiction", "a man sits", "he runs away now"])
    write_tsv(folder / "raw-snli", ["gold_label", "sentence1", "sentence2"], pairs)
    prepare("snli", folder / "raw-snli", folder / "pairs", tokenizer="regex", jobs=1)
    train(folder, "snli/seed-0", "snli/ma", "pairs")
    return folder


@pytest.fixture
def repulsive(place, monkeypatch, capsys):
    monkeypatch.chdir(place)

    def run(*words, code=0):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        seen = capsys.readouterr()
        assert left.value.code == code, seen.err
        if code:
            assert len(seen.err.strip().splitlines()) == 1, seen.err
        return seen.out if code == 0 else seen.err

    return run


@pytest.fixture(scope="module")
def content(place):
    return gather([place / "ma", place / "svgd"], Options(foreign=place / "hostile", device="cpu"))

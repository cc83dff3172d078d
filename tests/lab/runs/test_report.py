"""`repulsive report` on tiny real runs: every number of the page is one that was measured another way."""

import html
import json
import re
import shutil

import pytest
import torch

from repulsive.cli import main
from repulsive.diagnostics.redundancy import all_but_one, head_ablation, pruning_curve
from repulsive.diagnostics.uncertainty import bootstrap_weights, detect_foreign, mixture
from repulsive.errors import ConfigError
from repulsive.lab.engine.launch import Spec, train_here
from repulsive.lab.engine.reporting import BOOTSTRAP_DRAWS
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.head_counts import grouped, heads_of
from repulsive.lab.runs.load import open_methods
from repulsive.lab.runs.report import Options, gather
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.foreign import open_foreign, reencoded, unknown_share
from repulsive.lab.systems.classification.measure import measure_classifier, predictions
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import UNK, Vocabulary
from repulsive.metrics.classification import brier, ece, nll, oe, overlap
from repulsive.pages import render_page
from repulsive.pages.figures import write as figures
from tests.lab.systems.translation import digits
from tests.pages.browser import needs_browser, open_page

TINY = {
    "model.units": 4,
    "model.hidden": 4,
    "model.mlp": 8,
    "model.embedding": 6,
    "model.gate": 5,
    "training.epochs": 2,
    "training.batch": 16,
    "training.precision": "fp32",
}
RUNS = "document.title='broken into'"
EVIL = f"<img src=x onerror={RUNS}>"
CPU = torch.device("cpu")


def train(place, name, recipe, data, heads=3, seed=0, **changes):
    words = {**TINY, "data.folder": place / data, "model.heads": heads, "seed": seed, **changes}
    spec = Spec(open_recipe(recipe, [f"{key}={value}" for key, value in words.items()]), place / name, "cpu")
    train_here(spec, make_task, quiet=True)


def write_tsv(folder, header, rows):
    folder.mkdir()
    for part in ("train", "dev", "test"):
        (folder / f"{part}.tsv").write_text("\n".join(["\t".join(header), *("\t".join(row) for row in rows * 6)]))


@pytest.fixture(scope="module")
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


def panel(content, title):
    return next(panel for panel in content.panels if panel.title == title)


def results(place, name, metric):
    return [RunFolder(place / name / f"seed-{seed}").result["test"][metric] for seed in (0, 1)]


def test_the_table_is_what_the_runs_came_to_with_paired_comparisons(content, place):
    ma, svgd = content.table.rows
    names = [metric.name for metric in content.table.metrics]
    assert (ma.method, svgd.method, content.table.baseline) == ("MA", "SVGD", "MA")
    for row, name in ((ma, "ma"), (svgd, "svgd")):
        cell = row.cells[names.index("NLL")]
        assert cell.mean == pytest.approx(sum(results(place, name, "nll")) / 2)
    paired = svgd.cells[names.index("NLL")].paired
    assert paired.difference == pytest.approx(svgd.cells[1].mean - ma.cells[1].mean) and paired.seeds == 2
    assert ma.cells[1].paired is None


def test_learning_curves_have_a_band_over_seeds(content, place):
    chart = next(chart for chart in content.charts if chart.name == "dev NLL")
    looks = [[line for line in RunFolder(place / f"ma/seed-{s}").lines() if line["kind"] == "dev"] for s in (0, 1)]
    values = [[line["nll"] for line in run] for run in looks]
    assert [y for _, y in chart.series[0].points] == pytest.approx([sum(v) / 2 for v in zip(*values, strict=True)])
    _, low, high = chart.series[0].band[-1]
    assert high - low == pytest.approx(2 * abs(values[0][-1] - values[1][-1]) / 2**0.5)


def test_each_head_is_worth_what_a_pass_without_it_says(content, place):
    task, model = load_run(RunFolder(place / "svgd/seed-0"), CPU)
    found = measure_classifier(model, task.parts["test"], most=1000)
    slow = head_ablation(model, lambda m: task.evaluate(m, "test").items["correct"].double())
    torch.testing.assert_close(found.change, slow.change[0])
    exact = slow.change[0]
    other = load_run(RunFolder(place / "svgd/seed-1"), CPU)
    both = torch.cat([exact, measure_classifier(other[1], task.parts["test"], most=1000).change])
    row = next(row for row in panel(content, "Effect of each head").sheets[0].rows if row[0] == "SVGD")
    assert row[1] == "6" and float(row[2].replace("−", "-")) == pytest.approx(100 * float(both.mean()), abs=0.006)
    few = measure_classifier(model, task.parts["test"], most=20)
    assert few.items == 20 and len(few.bootstrap) == 20


def test_heads_alone_and_fewer_and_fewer_are_what_passes_without_them_say(place):
    for name in ("svgd", "snli"):
        task, model = load_run(RunFolder(place / name / "seed-0"), CPU)
        found = measure_classifier(model, task.parts["test"], most=1000)

        def right(m, task=task):
            return task.evaluate(m, "test").items["correct"].double()

        alone = all_but_one(model, right)
        torch.testing.assert_close(found.alone, alone.baseline + alone.change[0])
        curve = pruning_curve(model, right, -found.change.unsqueeze(0), share=0.01)
        assert found.pruned.order == curve.order and found.pruned.removed == curve.removed == (0, 1, 2, 3)
        assert found.pruned.metric == pytest.approx(curve.metric)


def test_attention_in_common_is_the_metric_of_the_table(content, place):
    grid = next(g for g in panel(content, "Similarity of heads").grids if g.what == "shared attention")
    i, j = torch.triu_indices(3, 3, 1)
    assert float(grid.values[i, j].mean()) == pytest.approx(results(place, "ma", "overlap")[0], rel=1e-5)
    assert grid.values.diagonal().tolist() == pytest.approx([1, 1, 1])


def test_calibration_is_that_of_the_kept_answers(content, place):
    sheet, sampled = panel(content, "Calibration").sheets
    kept = [RunFolder(place / f"ma/seed-{s}").items("test") for s in (0, 1)]
    for column, (metric, *bins) in enumerate(((ece, 15), (oe, 15), (ece, 100), (oe, 100), (nll,), (brier,)), 1):
        mean = sum(float(metric(k["logits"].double().softmax(-1), k["labels"], *bins)) for k in kept) / 2
        assert sheet.rows[0][column].split(" ± ")[0] == f"{mean:.3f}"
    assert float(sampled.rows[0][1].split()[0]) == pytest.approx(sum(results(place, "ma", "nll")) / 2, abs=6e-4)
    assert sampled.rows[0][2] != sampled.rows[0][1]  # resampled heads say something else


def test_what_leaves_the_heads_is_compared_over_all_items(content, place):
    grid = next(g for g in panel(content, "Similarity of heads").grids if g.what == "cosine of outputs")
    task, model = load_run(RunFolder(place / "ma/seed-0"), CPU)
    part = task.parts["test"]
    ids, lengths = part.sentences[0].padded(torch.arange(len(part)))
    with torch.inference_mode():
        left = model(ids, lengths, collect=True)[2].double()  # [N, M, d]
    unit = left / left.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(grid.values, (unit @ unit.mT).mean(0), atol=1e-6, rtol=0)


def test_each_head_of_each_seed_has_a_number(content):
    first, second = panel(content, "Effect of each head").heads
    assert first.rows == ["seed 0", "seed 1"] and first.values.shape == (2, 3)
    row = next(r for r in panel(content, "Effect of each head").sheets[0].rows if r[0] == "SVGD")
    assert float(row[2].replace("−", "-")) == pytest.approx(float(second.values.mean()), abs=0.006)


def test_how_sure_a_run_is_needs_no_other_texts(place):
    content = gather([place / "ma"], Options(most=5, device="cpu"))
    (chart,) = panel(content, "Entropy of predictions").charts
    kept = torch.cat([RunFolder(place / f"ma/seed-{s}").items("test")["logits"] for s in (0, 1)]).double().softmax(-1)
    middle = chart.series[0].points[50]
    entropies = -(kept * kept.log()).sum(-1)
    assert middle[1] == pytest.approx(float((entropies <= middle[0]).double().mean()))


def test_words_of_another_vocabulary_become_those_of_the_run():
    theirs, ours = Vocabulary.build([["a", "b", "c"]]), Vocabulary.build([["c", "x", "a"]])
    part = Part((theirs.encode([["a", "b"], ["c", "zzz", "a"]]),), torch.tensor([0, 1]))
    found = reencoded(part, theirs, ours)
    assert [[ours.words[i] for i in found.sentences[0][k].tolist()] for k in (0, 1)] == [
        ["a", "<unk>"],
        ["c", "<unk>", "a"],
    ]
    assert unknown_share(found) == pytest.approx(2 / 5)
    assert torch.equal(reencoded(found, ours, theirs).sentences[0].offsets, part.sentences[0].offsets)


def test_foreign_texts_are_told_by_entropy_as_without_the_report(content, place):
    own = Prepared.load(place / "data")
    other = open_foreign(place / "hostile", own, "test")
    words = Prepared.load(place / "hostile")
    known = [i for i, word in enumerate(words.vocabulary.words) if word in own.vocabulary.index]
    assert known and int((other.sentences[0].values == UNK).sum()) > 0
    found = []
    for seed in (0, 1):
        run = RunFolder(place / f"ma/seed-{seed}")
        inside = run.items("test")["logits"].double().softmax(-1)
        found.append(detect_foreign(inside, predictions(load_run(run, CPU)[1], other)).auroc)
    row = panel(content, "Entropy on foreign texts").sheets[0].rows[0]
    assert row[3].split(" ± ")[0] == f"{sum(found) / 2:.3f}"


def test_every_figure_has_a_file_of_its_own(content):
    files = [chart.file for chart in content.all_charts()]
    assert all(files) and len(set(files)) == len(files) and {"redundancy-2", "reliability-1", "dev-nll"} <= set(files)


def test_examples_are_read_by_every_method(content, place):
    words = set(Prepared.load(place / "data").vocabulary.words)
    assert len(content.examples) == 8
    for example in content.examples:
        assert [reading.method for reading in example.readings] == ["MA", "SVGD"] and set(example.tokens) <= words
        assert torch.allclose(example.readings[1].weights().sum(-1), torch.ones(3).double(), atol=1e-5)


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


def test_pairs_are_read_side_by_side(place):
    content = gather([place / "snli"], Options(device="cpu"))
    assert all("‖" in example.tokens for example in content.examples)
    task, model = load_run(RunFolder(place / "snli/seed-0"), CPU)
    slow = head_ablation(model, lambda m: task.evaluate(m, "test").items["correct"].double())
    found = measure_classifier(model, task.parts["test"], most=100)
    torch.testing.assert_close(found.change, slow.change[0])
    part = task.parts["test"]
    tables = [side.padded(torch.arange(len(part))) for side in part.sentences]
    with torch.inference_mode():
        _, seen, made = model(*(ids for ids, _ in tables), *(lengths for _, lengths in tables), collect=True)
        left = torch.einsum("bmu,muk->bmk", made[0], model.premise_gate)
        both = left * torch.einsum("bmu,muk->bmk", made[1], model.hypothesis_gate)  # [B, M, k]
        counts = bootstrap_weights(3, BOOTSTRAP_DRAWS, torch.Generator().manual_seed(0))
        by_hand = mixture(torch.stack([model.classify((n.view(-1, 1) * both).float().flatten(1)) for n in counts]))
    i, j = torch.triu_indices(3, 3, 1)
    torch.testing.assert_close(found.bootstrap, by_hand, atol=1e-5, rtol=0)
    mean = (overlap(seen[0]) + overlap(seen[1])) / 2
    assert float(found.overlap[i, j].mean()) == pytest.approx(float(mean), rel=1e-5)


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


def test_one_head_has_no_pairs_and_a_page_all_the_same(place):
    content = gather([place / "ma-1", place / "svgd"], Options(device="cpu"))
    one, three = panel(content, "Similarity of heads").sheets[0].rows
    assert one[1:] == ["–", "–", "–", "1.00 ± 0.00", "1"] and "–" not in three
    assert panel(content, "Effect of each head").sheets[0].rows[0][1] == "2"  # one head of each of two seeds
    assert "one head: no pairs" in render_page(content)


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


def test_a_translation_has_all_that_needs_no_classes(tmp_path):
    for package in ("sacremoses", "tokenizers", "sacrebleu"):
        pytest.importorskip(package)
    data = digits.make_data(tmp_path, size=60, talks="valid")
    digits.train(data, tmp_path / "run" / "seed-0", "training.epochs=1")
    content = gather([tmp_path / "run"], Options(device="cpu"))
    assert [panel.title for panel in content.panels] == [
        "Layers in training",
        "Similarity of heads",
        "Effect of each head",
        "Pruning",
        "Not in this report",
    ]
    assert content.table.metrics[0].name == "BLEU" and not content.examples
    other = gather([tmp_path / "run"], Options(part="talks", device="cpu"))
    expected = RunFolder(tmp_path / "run" / "seed-0").result["dev"]["bleu"]
    assert other.table.rows[0].cells[0].mean == expected and other.lead.endswith("on the test set talks.")
    task, model = load_run(RunFolder(tmp_path / "run" / "seed-0"), CPU)
    without = head_ablation(model, lambda m: task.evaluate(m, "test").metrics["accuracy"])
    (row,) = panel(content, "Effect of each head").sheets[0].rows
    assert "20 items of the test set" in panel(content, "Effect of each head").lead[0]
    assert row[1] == "12" and row[3] == f"{100 * float(without.change.min()):+.2f}".replace("-", "−")
    with pytest.raises(ConfigError, match="of another task"):
        gather([tmp_path / "run"], Options(foreign=tmp_path / "prepared", device="cpu"))


@pytest.mark.gpu
def test_a_gpu_measures_the_same(place):
    for name in ("svgd", "snli"):
        run = RunFolder(place / name / "seed-0")
        here, there = (load_run(run, torch.device(device)) for device in ("cpu", "cuda"))
        a, b = (measure_classifier(model, task.parts["test"], most=60) for task, model in (here, there))
        torch.testing.assert_close(a.change, b.change)
        torch.testing.assert_close(a.overlap, b.overlap, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.bootstrap, b.bootstrap, atol=1e-3, rtol=0)

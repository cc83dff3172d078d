"""Numbers of `repulsive report` on tiny real runs: each one is measured in another way as well."""

import pytest
import torch

from repulsive.diagnostics.redundancy import all_but_one, head_ablation, pruning_curve
from repulsive.diagnostics.uncertainty import bootstrap_weights, detect_foreign, mixture
from repulsive.errors import ConfigError
from repulsive.lab.engine.reporting import BOOTSTRAP_DRAWS
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.report import Options, gather
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.foreign import open_foreign, reencoded, unknown_share
from repulsive.lab.systems.classification.measure import measure_classifier, predictions
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import UNK, Vocabulary
from repulsive.metrics.classification import brier, ece, nll, oe, overlap
from repulsive.pages import render_page
from tests.lab.runs.reported_runs import CPU, panel, results
from tests.lab.systems.translation import digits


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


def test_one_head_has_no_pairs_and_a_page_all_the_same(place):
    content = gather([place / "ma-1", place / "svgd"], Options(device="cpu"))
    one, three = panel(content, "Similarity of heads").sheets[0].rows
    assert one[1:] == ["–", "–", "–", "1.00 ± 0.00", "1"] and "–" not in three
    assert panel(content, "Effect of each head").sheets[0].rows[0][1] == "2"  # one head of each of two seeds
    assert "one head: no pairs" in render_page(content)


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

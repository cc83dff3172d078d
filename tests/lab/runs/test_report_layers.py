"""Reports on translators: heads at work, taken away by accuracy and by BLEU, and their maps, against other ways."""

from dataclasses import replace

import pytest
import torch

from repulsive.cli import main
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.redundancy import ablate
from repulsive.diagnostics.similarity import of_attention
from repulsive.lab.engine.reporting import ReportOptions
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.report import Options, gather
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.translation.measure import accuracy_of, bleu_of, measure_translator
from tests.lab.systems.translation import digits
from tests.pages.browser import needs_browser, open_page

for package in ("sacremoses", "tokenizers", "sacrebleu"):
    pytest.importorskip(package)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    data = digits.make_data(folder, size=200)
    digits.train(data, folder / "ma" / "seed-0")
    digits.train(data, folder / "svgd" / "seed-0", "method.rule=svgd", "label=SVGD")
    return folder


@pytest.fixture(scope="module")
def run(place):
    return load_run(RunFolder(place / "ma" / "seed-0"), CPU)


def test_accuracy_is_that_of_the_task(run):
    task, model = run
    part = task.parts["test"]
    with torch.inference_mode():
        found, few = accuracy_of(part, 20)(model), accuracy_of(part, 5)(model)
        wanted = task.evaluate(model, "test").metrics["accuracy"]
    assert float(found.mean()) == pytest.approx(wanted) and few.shape == (5,)


def test_bleu_is_that_of_greedy_translations(run):
    task, model = run
    greedy = replace(task.recipe, search=replace(task.recipe.search, beam=1))
    other = type(task)(greedy)
    found = task.measure_heads(model, ReportOptions("test", most=20, bleu=True))
    source, references = task.parts["test"].sentences[0], task.references["test"]["words"]
    with torch.inference_mode():
        whole = other.evaluate(model, "test").metrics["bleu"] / 100
        assert bleu_of(source, references, task.pieces, task.recipe.search)(model) == pytest.approx(whole)
        with ablate(model, [(1, 2)]):
            without = other.evaluate(model, "test").metrics["bleu"] / 100
    assert float(found.by_layer[1, 2]) == pytest.approx(without - whole, abs=1e-9) and found.metric == "BLEU"


def test_heads_at_work_are_compared_without_padding(run):
    task, model = run
    found = measure_translator(model, task.parts["test"], most=1)
    part, cosines, weights = task.data.parts["test"], {}, {}
    for index in range(len(part)):
        source, target = (side.padded(torch.tensor([index]))[0].long() for side in part.sentences)
        before = torch.nn.functional.pad(target[:, :-1], (1, 0), value=2)
        for layer in capture(model, (source, before)).layers:
            cosines.setdefault(layer.name, []).append(of_attention(layer.weights[0]).cosine)
            weights.setdefault(layer.name, []).append(layer.weights[0].shape[2])
    assert [d.name for d in found.running["attention"]] == list(cosines)
    for d in found.running["attention"]:
        size = torch.tensor(weights[d.name], dtype=torch.float64)
        mean = (torch.stack(cosines[d.name]) * (size / size.sum()).view(-1, 1, 1)).sum(0)
        torch.testing.assert_close(d.cosine, mean, atol=1e-6, rtol=0)


def test_examples_have_the_maps_of_every_layer(place, run):
    task, model = run
    first, *_ = task.examples("test", {"MA": model}).layered
    assert first.texts["source"][-1] == "</s>" and first.texts["target"][0] == "<s>"
    layers = first.readings["MA"]
    assert [(m.layer, m.rows, m.columns) for m in layers] == [
        ("encoder layer 0", "source", "source"),
        ("decoder layer 0", "target", "target"),
        ("cross layer 0", "target", "source"),
    ]
    torch.testing.assert_close(layers[2].weights.sum(-1), torch.ones(layers[2].weights.shape[:2]))


def test_the_report_shows_layers_side_by_side(place):
    content = gather([place / "ma", place / "svgd"], Options(most=5, device="cpu"))
    panels = {panel.title: panel for panel in content.panels}
    assert [chart.name for chart in panels["Layers in training"].charts] == [
        "encoder layer 0",
        "decoder layer 0",
        "cross layer 0",
    ]
    grids = panels["Similarity of heads"].grids
    assert {(g.what, g.layer) for g in grids if g.method == "SVGD"} >= {
        ("cosine of attention", "cross layer 0"),
        ("cosine of outputs", "encoder layer 0"),
        ("cosine of weights, q", "decoder layer 0"),
    }
    first, second = panels["Effect of each head"].heads
    assert first.rows == ["encoder layer 0", "decoder layer 0", "cross layer 0"] and second.values.shape == (3, 4)
    assert len(content.layered) == 8 and list(content.layered[0].readings) == ["digits", "SVGD"]
    files = [chart.file for chart in content.all_charts()]
    assert len(set(files)) == len(files) and "distance-cross-layer-0" in files


@needs_browser
@pytest.mark.slow
def test_the_page_opens_and_the_figures_are_there(place, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(place)
    words = ["ma", "svgd", "--bleu", "--most", "4", "--figures", "figures", "--out", "page.html", "--device", "cpu"]
    with pytest.raises(SystemExit) as left:
        main(["report", *words])
    assert left.value.code == 0, capsys.readouterr().err
    names = {path.name for path in (place / "figures").iterdir()}
    assert {"attention-1-1.svg", "attention-8-2.pdf", "cosine-of-attention.svg", "redundancy-2.pdf"} <= names
    seen = open_page(place / "page.html", "example=2&layer=3&heads=1")
    assert seen.console == [] and seen.dom.count('class="column"') == 2 and "target attends to source" in seen.dom
    assert "change of BLEU" in seen.dom and "Not in this report" in seen.dom

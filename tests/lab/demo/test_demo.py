"""The demo as a whole: page, table and last line show the numbers of the runs."""

import html
import io
import json
import re
import statistics
from dataclasses import replace

import pytest

from repulsive.errors import RunError
from repulsive.lab.demo import run, trained
from repulsive.lab.demo.example import choose, read
from repulsive.lab.demo.findings import LARGEST, LOSS, MEAN, Difference, Findings
from repulsive.lab.demo.page import inspect_commands, numbers_sheet, repel_line
from repulsive.lab.demo.runs import read_result
from repulsive.lab.demo.settings import ARMS, PLAIN, REGULARIZED, REPELLED
from repulsive.lab.demo.terminal import Lines, LiveTable, curve
from repulsive.metrics import student
from repulsive.pages.text import number
from tests.lab.demo.small import SEEDS, SMALL, small_text, train_small
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "deep" / "demo"


@pytest.fixture(scope="module")
def jobs(out):
    return train_small(out)


@pytest.fixture(scope="module")
def printed(out, jobs):
    lines: list[str] = []
    run.run_demo(out, SMALL, SEEDS, lines.append, text=small_text())
    return "\n".join(lines)


@pytest.fixture(scope="module")
def findings(jobs):
    return Findings([read_result(job) for job in jobs])


def shown(out) -> str:
    """Text of the page, with ASCII signs."""
    page = (out / "report.html").read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<[^>]+>", " ", page.split("<body>")[1])).replace("−", "-")


def test_differences_are_paired_by_seed(findings):
    for measure in (MEAN, LARGEST, LOSS):
        own = [getattr(findings.results[REPELLED, seed], measure.key) for seed in SEEDS]
        plain = [getattr(findings.results[PLAIN, seed], measure.key) for seed in SEEDS]
        change = findings.difference(REPELLED, measure)
        assert list(change.values) == [a - b for a, b in zip(own, plain, strict=True)]
        assert change.interval == student.interval(change.values)


def test_page_table_and_last_line_show_the_same_numbers(out, printed, findings):
    page = shown(out)
    for measure in (MEAN, LARGEST, LOSS):
        for arm in ARMS:
            mean = statistics.fmean(getattr(findings.results[arm, seed], measure.key) for seed in SEEDS)
            assert re.search(rf"{arm} +{re.escape(f'{mean:.{measure.digits}f}')}\b", printed)
            assert f"{mean:.{measure.digits}f}" in page
            if arm != PLAIN:
                change = str(findings.difference(arm, measure))
                assert change in printed and change in page
    last = printed.splitlines()[-1]
    assert last == findings.last_line()
    assert str(findings.difference(REPELLED, LOSS)) in last
    assert f"{findings.mean(PLAIN, MEAN)} -> {findings.mean(REPELLED, MEAN)}" in last
    assert str(findings.difference(REPELLED, LOSS)) in page and str(findings.difference(REGULARIZED, LOSS)) in page


def test_the_page_starts_with_what_was_found(out, printed, findings):
    page = shown(out)
    start = page.index(findings.heads_sentence())
    assert start < page.index(findings.loss_sentence()) < page.index("How different are the heads?")
    assert "none was chosen by its effect on this text" in page


def test_dots_of_the_charts_are_the_runs(out, printed, findings):
    page = (out / "report.html").read_text(encoding="utf-8")
    for arm in ARMS:
        for seed in SEEDS:
            for measure in (MEAN, LARGEST, LOSS):
                value = number(getattr(findings.results[arm, seed], measure.key), measure.digits)
                assert f"<title>{arm}, seed {seed}: {value}</title>" in page


def test_lines_stay_within_eighty_columns(printed):
    assert max(len(line) for line in printed.splitlines() if not line.startswith("page: ")) <= 80


def test_summary_has_the_numbers_of_every_run(out, printed, findings):
    table = json.loads((out / "summary.json").read_text())
    assert table["seeds"] == list(SEEDS)
    for arm in ARMS:
        assert table["measures"]["held_out"][arm]["seeds"] == findings.values(arm, LOSS)
    own = table["measures"]["mean"]["repelled"]
    assert tuple(own["interval"]) == findings.difference(REPELLED, MEAN).interval


def test_the_sentence_is_nearest_the_median(findings):
    sentences = ["The river of the garden opens a window.", "The letter of the market reads a village."]
    chosen = choose(findings, sentences)
    effects = {}
    for seed in SEEDS:
        for sentence in sentences:
            one = choose(Findings([r for r in findings.results.values() if r.job.seed == seed]), [sentence])
            effects[seed, sentence] = one.effect
    median = statistics.median(effects.values())
    assert chosen.median == pytest.approx(median) and chosen.candidates == 4
    nearest = min(abs(effect - median) for effect in effects.values())
    assert abs(effects[chosen.seed, chosen.sentence] - median) == pytest.approx(nearest)
    example = read(findings, chosen)
    assert list(example.readings) == [PLAIN, REPELLED]
    assert example.texts["text"][3] == "␣" and len(example.readings[PLAIN]) == SMALL.layers


def test_the_page_names_the_seed_of_maps_and_curves(out, printed):
    seed = json.loads((out / "summary.json").read_text())["shown_seed"]
    page = shown(out)
    assert f"the plain and the repelled model of seed {seed}" in page
    assert f"every pair of heads, models of seed {seed}" in page
    assert "Mean over 2 seeds; the band is one standard deviation." in page


def test_finished_runs_are_not_trained_again(out, jobs, printed):
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert len(stamps) == 6
    run.run_demo(out, SMALL, SEEDS, lambda line: None, text=small_text())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} == stamps
    assert read_result(replace(jobs[0], settings=replace(SMALL, lr=1e-3))) is None  # another run


@pytest.mark.parametrize("content", ["", "[]", "{", '{"run": 1}', "null"])
def test_a_damaged_result_is_trained_again(content, tmp_path, jobs):
    job = replace(jobs[0], out=tmp_path)
    job.folder.mkdir(parents=True)
    for path in jobs[0].folder.iterdir():
        (job.folder / path.name).write_bytes(path.read_bytes())
    assert read_result(job) is not None
    (job.folder / "result.json").write_text(content)
    assert read_result(job) is None


def test_one_seed_has_no_interval(findings):
    one = Findings([result for result in findings.results.values() if result.job.seed == SEEDS[0]])
    assert one.difference(REPELLED, LOSS).interval is None
    assert one.last_line().endswith("one seed has no interval.") and "[" not in one.as_text()
    assert "one seed gives no interval" in one.loss_sentence() and one.heads_sentence().startswith("With one seed")
    assert "95 %" not in numbers_sheet(one).caption


@pytest.mark.parametrize(
    ("values", "direction", "text"),
    [
        ((-0.020, -0.021, -0.019), -1, "-0.020 [-0.022, -0.018]"),
        ((0.020, 0.021, 0.019), 1, "+0.020 [+0.018, +0.022]"),
        ((-0.020, 0.021, 0.019), 0, "+0.007 [-0.051, +0.064]"),
    ],
)
def test_the_verdict_follows_the_interval(values, direction, text, findings, monkeypatch):
    change = Difference(values, 3)
    assert (change.direction, str(change)) == (direction, text)
    monkeypatch.setattr(findings, "difference", lambda arm, measure: change)
    word = {-1: "lower", 1: "higher", 0: "not significant"}[direction]
    heads = {-1: "Heads less alike: ", 1: "Heads more alike: ", 0: "Heads "}[direction]
    assert findings.last_line().startswith(heads) and findings.last_line().endswith(f"Loss {text}: {word}.")
    assert {-1: "is lower", 1: "is higher", 0: "not significantly different"}[direction] in findings.loss_sentence()


def test_without_a_terminal_every_run_is_one_line(jobs, findings):
    lines: list[str] = []
    with Lines(len(jobs), lines.append) as view:
        for job in jobs:
            view.update(job, findings.results[job.arm, job.seed].history)
            view.ended(job, findings.results[job.arm, job.seed])
    first = findings.results[PLAIN, SEEDS[0]]
    assert len(lines) == 6 and lines[0].startswith(" 1 of 6  seed 3  plain ")
    assert f"held-out loss {first.held_out:.3f}  cosine {first.mean:.2f}, largest {first.largest:.2f}" in lines[0]


def test_the_live_table_shows_both_models_side_by_side(jobs, findings):
    console = pytest.importorskip("rich.console").Console(width=80, file=io.StringIO())
    view = LiveTable(SMALL, SEEDS, console)
    view.update(jobs[0], findings.results[PLAIN, 3].history[:2])
    view.ended(jobs[1], findings.results[REPELLED, 3])
    console.print(view.render())
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["seed", *ARMS] and max(map(len, lines)) <= 80
    loss = [f"{findings.results[arm, 3].history[at].loss:.3f}" for arm, at in ((PLAIN, 1), (REPELLED, 3))]
    similarity = [f"{findings.results[arm, 3].history[at].mean:.2f}" for arm, at in ((PLAIN, 1), (REPELLED, 3))]
    assert [word for word in lines[1].split() if re.match(r"-?\d\.", word)] == loss
    assert [word for word in lines[2].split() if re.match(r"-?\d\.", word)] == similarity
    assert "25 % of 72 steps" in lines[-1]  # 6 + 12 steps


def test_curves_grow_to_the_right():
    assert curve([0.0], (0.0, 1.0), 4) == "▁▁▁"
    assert curve([0.0, 2.0, 0.5, -1.0], (0.0, 1.0), 4) == "▁▁▁██▅▅▅▁▁"


def test_an_output_path_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunError, match=r"--out '.*taken': cannot be created \(File exists\); choose another folder"):
        run.run_demo(tmp_path / "taken", SMALL, SEEDS, print, text=small_text())


def test_the_trained_models_can_be_inspected(out, printed, monkeypatch):
    monkeypatch.chdir(out)
    inputs = trained.windows()
    assert inputs.shape == (16, SMALL.length)
    plain, repelled = trained.plain()(inputs), trained.repelled()(inputs)
    assert plain.shape == (16, SMALL.length, 128) and not plain.equal(repelled)
    assert inspect_commands(out)[0] == f"cd {out}" and "trained:repelled" in inspect_commands(out)[1]
    monkeypatch.chdir(out.parent)
    with pytest.raises(RunError, match=r"no summary.json in the current folder; run `repulsive demo`"):
        trained.plain()


def test_the_line_of_the_default_rule_needs_no_name():
    assert repel_line("recommended") == "handle = repel(model, optimizer)"
    assert repel_line("logits") == 'handle = repel(model, optimizer, "logits")'


@needs_driver
@pytest.mark.slow
def test_the_page_in_a_browser(out, printed):
    page = out / "report.html"
    with driven_browser() as browser:
        for dark, width in ((False, 1280), (True, 390)):
            with driven_page(browser, page, dark=dark, width=width) as (tab, messages):
                assert tab.evaluate("document.documentElement.scrollWidth") == width
                assert tab.is_visible("#stage .thumb") and messages == []
            assert violations(browser, page, dark=dark, width=width) == []

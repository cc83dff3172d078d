"""Translation at the paper's settings, at toy size: equal epochs at every stop, resuming, records and tables."""

import io
import json
import time
from pathlib import Path

import pytest
import torch

from repulsive.errors import RunError
from repulsive.lab.engine.files import write_json
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stop_signals import Stopped
from repulsive.metrics.bleu import bleu_of
from tests.lab.systems.translation import digits
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")

EPOCHS = 4


@pytest.fixture(scope="module")
def script():
    with study("studies.translation.paper_settings") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits.make_data(tmp_path_factory.mktemp("data"), size=100) / "prepared"


def words(data, folder, *more):
    places = ("--data", data, "--out", folder / "runs", "--records", folder / "records")
    places += ("--results", folder / "results")
    return [*map(str, places), "--tiny", "--device", "cpu", "--epochs", str(EPOCHS), *more]


def arguments(script, data, folder, *more):
    """The arguments of the command line, without running it."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "run", lambda parsed, records: found.append(parsed))
        script.main(words(data, folder, *more))
    return found[0]


def test_urgent_rows_come_first_seed_by_seed(script, data, tmp_path):
    plan = [list(specs) for _, specs in script.cohorts(arguments(script, data, tmp_path))]
    first = ("plain", "published", "kernel-free")
    assert plan[:3] == [[(row, seed) for row in first] for seed in range(3)]
    second = ("recommended", "disagreement", "released", "published-late")
    assert plan[3] == [(row, 0) for row in second]
    assert plan[6] == [(f"published-{part}", 0) for part in "qkv"] and len(plan) == 15


def test_rows_can_have_fewer_seeds_than_others(script, data, tmp_path, capsys):
    more = ("--rows", "plain", "disagreement:1", "--seeds", "2", "--together")
    ((_, specs),) = script.cohorts(arguments(script, data, tmp_path, *more))
    assert list(specs) == [("plain", 0), ("disagreement", 0), ("plain", 1)]
    for wrong, message in (("plian", "'plian' is not a row; choose from plain, "), ("plain:0", "at least 1")):
        with pytest.raises(SystemExit):
            script.main(words(data, tmp_path, "--rows", wrong))
        assert message in capsys.readouterr().err


def test_everything_side_by_side(script, data, tmp_path):
    more = ("--together", "--seeds", "2", "--rows", "plain", "published", "disagreement")
    ((_, specs),) = script.cohorts(arguments(script, data, tmp_path, *more))
    assert list(specs) == [(row, seed) for seed in range(2) for row in ("plain", "published", "disagreement")]


def test_runs_have_the_settings_of_the_paper(script, tmp_path):
    parsed = arguments(script, "prepared", tmp_path)
    parsed.tiny, parsed.epochs = False, script.EPOCHS
    for _, specs in script.cohorts(parsed):
        for (row, _), spec in specs.items():
            recipe = spec.recipe
            assert (recipe.model.width, recipe.model.heads, recipe.model.depth) == (512, 4, (6, 6))
            assert (recipe.optimizer.lr, recipe.optimizer.warmup, recipe.optimizer.schedule) == (
                5e-4,
                4000,
                "inverse-sqrt",
            )
            assert (recipe.training.batch, recipe.training.epochs, recipe.packed) == (4096, 37, True)
            chosen = set(row.split("-")[1:])
            assert {recipe.method.parts} == (chosen & {"q", "k", "v"} or {"qkv"})
            assert {recipe.method.where} == (chosen & {"encoder", "decoder", "cross"} or {"all"})
            # A constant alpha does not depend on the length of the training.
            assert recipe.method.schedule == ("warmup" if row == "published-late" else "constant")


class TestGate:
    @pytest.fixture
    def made(self, script, tmp_path):
        from studies.translation import equal_epochs

        def make(*done, end=1000.0, until=None):
            gate = equal_epochs.Gate(tmp_path / "gate.json")
            jobs = [equal_epochs.Job(script.Spec(None, tmp_path / str(n)), gate) for n in range(len(done))]
            self.report(jobs, *done)
            return gate, jobs, equal_epochs.Gatekeeper(gate, jobs, 10, time.monotonic() + end, until)

        return make

    @staticmethod
    def report(jobs, *done):
        for job, epochs in zip(jobs, done, strict=True):
            job.folder.mkdir(exist_ok=True)
            write_json(job.folder / "progress.json", {"epochs": epochs})

    def test_a_run_is_at_most_one_epoch_ahead(self, made):
        gate, jobs, keeper = made(0, 0)
        keeper.look()
        assert keeper.allowed == 2 and gate.wait(1)
        self.report(jobs, 2, 1)
        keeper.look()
        assert keeper.allowed == 3
        self.report(jobs, 3, 1)
        keeper.look()
        assert keeper.allowed == 3 and not keeper.is_final
        keeper.remove(jobs[1])  # it failed: nobody waits for it
        keeper.look()
        assert keeper.allowed == 5

    def test_runs_stop_after_the_same_epoch_in_time(self, made, monkeypatch):
        class Now:
            seconds = 100.0

        monkeypatch.setattr(time, "monotonic", lambda: Now.seconds)
        gate, jobs, keeper = made(0, 0, end=30.0)
        for epochs in (1, 2):
            Now.seconds += 10
            self.report(jobs, epochs, epochs)
            keeper.look()
        assert keeper.is_final and keeper.allowed == 3  # another epoch after it would take too long
        assert gate.wait(2) and not gate.wait(3)
        self.report(jobs, 3, 3)
        keeper.look()
        assert keeper.allowed == 3

    def test_runs_stop_after_a_given_epoch(self, made):
        gate, jobs, keeper = made(0, 0, until=3)
        for epochs, is_final in ((0, False), (1, True), (2, True)):
            self.report(jobs, epochs, epochs)
            keeper.look()
            assert keeper.is_final == is_final
        assert keeper.allowed == 3 and gate.wait(2) and not gate.wait(3)

    def test_a_run_that_is_ahead_of_the_others_sets_the_first_stop(self, made):
        gate, _, keeper = made(5, 3, end=-1.0)
        keeper.look()
        assert keeper.is_final and keeper.allowed == 6 and gate.wait(5) and not gate.wait(6)


@pytest.fixture(scope="module")
def trained(script, data, tmp_path_factory):
    """Two rows and two seeds: seed 0 stops after two epochs and is resumed, seed 1 stays stopped after three."""
    folder = tmp_path_factory.mktemp("trained")
    found = []
    for parsed in [arguments(script, data, folder, "--rows", "plain", "published", "--seeds", "2")]:
        for name, specs in script.cohorts(parsed):
            gate = script.Gate(folder / f"{name}.json")
            for stop in (2, EPOCHS) if name == "gate-0-0" else (3,):
                gate.set(stop, True)
                for spec in specs.values():
                    try:
                        script.train(script.Job(spec, gate), io.StringIO())
                    except Stopped:
                        assert stop < EPOCHS
                records = script.Records(folder / "records")
                records.collect({key: spec.folder for key, spec in specs.items()})
                found.append({key: (run["epochs"], run["complete"]) for key, run in records.runs.items()})
    return folder, found


def test_runs_stop_at_the_gate_and_resume(trained):
    folder, found = trained
    both = [("plain", 0), ("published", 0)]
    assert found[0] == dict.fromkeys(both, (2, False)) and found[1] == dict.fromkeys(both, (EPOCHS, True))
    assert found[2] == found[1] | {("plain", 1): (3, False), ("published", 1): (3, False)}
    for row in ("plain", "published"):
        steps = [step for step, _ in RunFolder(folder / "runs" / row / "seed-0").curve("dev", "nll")]
        assert steps == [steps[0] * epoch for epoch in range(1, EPOCHS + 1)]  # no epoch twice, none missing
    assert {path.name for path in (folder / "records").iterdir()} == {"runs.json.xz", "answers.npz"}


def test_runs_with_enough_epochs_are_not_trained_again(script, trained):
    records = script.Records(trained[0] / "records")
    assert records.is_complete(("plain", 0)) and not records.is_complete(("plain", 1))
    assert records.is_complete(("plain", 1), 3) and not records.is_complete(("plain", 1), 4)
    assert not records.is_complete(("kernel-free", 0), 1)


def test_records_hold_the_answers(script, trained):
    folder, _ = trained
    records = script.Records(folder / "records")
    run = RunFolder(folder / "runs" / "published" / "seed-0")
    found = records.evaluation(("published", 0), "test")
    assert found.metrics == run.metrics("test")
    assert bleu_of(found.items["bleu_statistics"].sum(0)) == pytest.approx(run.metrics("test")["bleu"])
    torch.testing.assert_close(found.items["nll"], run.items("test")["nll"].float())
    curves = records.runs["published", 0]["curves"]
    assert len(curves["entropy"]) == EPOCHS and curves["ratio"][-1][1] > 0
    assert curves["nll"][0][1] == pytest.approx(run.curve("dev", "nll")[0][1], rel=1e-5)
    records.collect({("published", 0): folder / "runs" / "published" / "seed-1"})  # fewer epochs: nothing changes
    assert records.runs["published", 0]["epochs"] == EPOCHS


def test_records_of_other_data_are_refused(script, trained):
    folder, _ = trained
    records = script.Records(folder / "records")
    records.runs["plain", 0]["data"] = {}
    with pytest.raises(RunError, match="other data"):
        records.collect({("plain", 1): folder / "runs" / "plain" / "seed-1"})


def test_records_of_other_settings_are_refused_before_training(script, data, trained, capsys):
    folder, _ = trained
    with pytest.raises(SystemExit):
        script.main(words(data, folder, "--rows", "kernel-free", "--set", "model.dropout=0.2"))
    assert "runs there have model.dropout=0.3, not 0.2; choose another --records" in capsys.readouterr().err
    assert not (folder / "runs" / "kernel-free").exists()


def test_tables_compare_runs_of_equal_length(script, data, trained, capsys):
    folder, _ = trained
    script.main(words(data, folder, "--tables"))
    text, results = capsys.readouterr().out, folder / "results"
    assert f"## After {EPOCHS} epochs" in text and "## After 3 epochs" in text and "(mean of the weights" in text
    found = json.loads((results / "paper_settings.json").read_text())
    sections = found["sections"]
    assert [section["epochs"] for section in sections] == [EPOCHS, 3]
    for seed, section in enumerate(sections):
        plain, published = section["parts"]["test"]["rows"]
        assert plain["seeds"] == published["seeds"] == [seed] and not plain["against"]
        difference = published["cells"]["nll"]["mean"] - plain["cells"]["nll"]["mean"]
        assert published["against"]["nll"]["difference"] == pytest.approx(difference, abs=1e-5)
        assert published["against"]["nll"]["over"] == "items"
    assert text.count("(one seed)") == 2 * 2 * 3 - 1  # sections, parts, metrics; a stopped run has no BLEU of dev
    assert "entropy (nats)" in text and "largest logit" in text
    assert len(found["curves"]["plain"]["entropy"]) == 3  # the epochs that both seeds have
    for name in ("paper_settings", "paper_settings-nll", "paper_settings-entropy", "paper_settings-logits"):
        assert (results / f"{name}.svg").read_text().startswith("<?xml")
    script.main(words(data, folder, "--tables", "--name", "other"))
    for ending in (".md", ".json", ".svg", "-nll.svg", "-entropy.svg", "-logits.svg"):
        assert (results / f"other{ending}").read_text() == (results / f"paper_settings{ending}").read_text()


@pytest.mark.slow
def test_the_command_stops_in_time_and_resumes(script, data, tmp_path, capsys):
    few = ("--rows", "plain", "published", "--seeds", "2", "--reserve", "5")
    script.main(words(data, tmp_path, *few, "--epochs", "1000", "--limit", "40"))
    runs = script.Records(tmp_path / "records").runs
    assert set(runs) == {("plain", 0), ("published", 0)}
    assert len({run["epochs"] for run in runs.values()}) == 1 and "4 of 4 runs left" in capsys.readouterr().out
    before = next(iter(runs.values()))["epochs"]
    script.main(words(data, tmp_path, *few, "--epochs", "1000", "--limit", "40"))
    after = {run["epochs"] for run in script.Records(tmp_path / "records").runs.values()}
    assert len(after) == 1 and before < after.pop() < 1000


def test_runs_of_a_seed_are_tried_again_once_after_a_failure(script, data, tmp_path, monkeypatch):
    calls = []

    def train(pool, jobs, *rest):
        calls.append([job.spec.folder.parent.name + str(job.spec.recipe.seed) for job in jobs])
        return len(calls) in (1, 3, 4)  # seed 0 fails once, seed 1 twice

    monkeypatch.setattr(script, "_train_together", train)
    options = arguments(script, data, tmp_path, "--rows", "plain", "published", "--seeds", "3")
    script.run(options, script.Records(tmp_path / "records"))
    first, second, third = ([f"{row}{seed}" for row in ("plain", "published")] for seed in range(3))
    assert calls == [first, first, second, second, third]


def test_the_page_has_the_entropies_of_the_table():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/measured.md").read_text()
    lines = (root / "results/translation/paper_settings.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Entropy of cross-attention"))
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines[start + 2 : start + 8])
    at = [head.index(f"epoch {epoch}") for epoch in (1, 2, 5, 32)]
    assert [row[1] for row in rows] == ["plain", "published", "kernel-free", "recommended (sphere)"]
    for row in rows:
        assert f"| {', '.join(row[column] for column in at)} |" in page


def test_the_page_of_results_has_the_first_epochs(script):
    root = Path(__file__).resolve().parents[2] / "results" / "translation"
    page = (root / "README.md").read_text()
    runs = script.Records(root / "first_epochs").runs
    assert len(runs) == 12 and {run["epochs"] for run in runs.values()} == {5}
    for run in runs.values():
        test, last = run["parts"]["test"], {name: curve[-1][1] for name, curve in run["curves"].items()}
        cells = f"{test['bleu']:.1f} | {test['nll']:.3f} | {last['entropy/cross']:.3f} | {last['token_cosine']:.3f}"
        assert f"| {cells} |" in page


def test_the_rows_that_fail_repel_the_values_of_the_encoder(script):
    """Only the row with a slow start repels them and learns."""
    runs = script.Records(Path(__file__).resolve().parents[2] / "results" / "translation" / "first_epochs").runs
    failed = {row for (row, _), run in runs.items() if run["curves"]["token_cosine"][-1][1] > 0.999}
    repelled = {
        row
        for (row, _), run in runs.items()
        if run["settings"]["method.rule"] == "svgd"
        and run["settings"]["method.alpha"] != 0
        and "v" in run["settings"]["method.parts"]
        and run["settings"]["method.where"] in ("all", "encoder")
    }
    assert failed == repelled - {"published-late"} and len(failed) == 5
    for (row, _), run in runs.items():
        assert (run["parts"]["test"]["bleu"] < 10) == (row in failed)

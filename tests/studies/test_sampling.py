"""The study of sampling Gaussians: known variances, single runs, its pages, and which cells are within 5 %."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from repulsive import SGLD, heads_by_hand, repel
from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "sampling"


@pytest.fixture(scope="module")
def modules():
    names = ("run", "page", "theory", "gaussians", "chains")
    with study("studies.sampling.run"):
        yield {name: sys.modules[f"studies.sampling.{name}"] for name in names}


@pytest.fixture(scope="module")
def method(modules):
    return {one.label: one for one in modules["chains"].METHODS}


@pytest.fixture(scope="module")
def runs():
    return json.loads((RESULTS / "gaussians.json").read_text())["runs"]


# -- known variances ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.001, 0.05, 0.5])
def test_variance_with_momentum_in_closed_form(step, modules, method):
    for label, mu in (("SGD", 0.0), ("SGD, momentum 0.9", 0.9), ("Adam", 0.9), ("AdamW", 0.9), ("RMSprop", 0.0)):
        expected = 1 / (1 - step * (1 - mu) / (2 * (1 + mu)))
        assert math.isclose(modules["theory"].discretised(method[label], step), expected, rel_tol=1e-9)


def test_variance_of_nesterovs_form_by_iteration(modules, method):
    """Second moments of weight and buffer, iterated in plain arithmetic until they stay."""
    step, mu = 0.05, 0.9
    lr = step * (1 - mu)
    of_theta, of_buffer, of_noise = 1 - lr * (1 + mu), -lr * mu**2, -lr * (1 + mu)  # in the next weight
    tt = tb = bb = 0.0
    for _ in range(5000):
        source = 2 / step
        tt, tb, bb = (
            of_theta**2 * tt + 2 * of_theta * of_buffer * tb + of_buffer**2 * bb + of_noise**2 * source,
            of_theta * tt + (of_theta * mu + of_buffer) * tb + of_buffer * mu * bb + of_noise * source,
            tt + 2 * mu * tb + mu**2 * bb + source,
        )
    assert math.isclose(modules["theory"].discretised(method["SGD, Nesterov 0.9"], step), tt, rel_tol=1e-9)
    assert abs(tt - 0.967) < 0.001


def test_known_variances_of_both_directions(modules, method):
    """Correlation 0.6: curvatures 2.5 and 0.625, diagonal of the precision 1.5625."""
    target = modules["gaussians"].Target("correlated", 0.04, 3.0)
    temperature = 1 + 0.04 / 2.5 * 9 * 1.5625 / 2
    expected = temperature / (1 - 0.04 / 2), temperature / (1 - 0.01 / 2)
    assert modules["theory"].known_variances(method["SGD"], target) == pytest.approx(expected, rel=1e-6)


def test_excess_by_a_second_moment_that_follows_the_weights(modules, method):
    Target, excess = modules["gaussians"].Target, modules["theory"].second_moment_excess
    assert excess(method["Adam"], Target("N(0, 1)", 0.001)) == pytest.approx(1 / 3)
    assert excess(method["Adam"], Target("N(0, 1)", 0.001, 3.0)) == pytest.approx(1 / 30)
    assert (
        excess(method["SGD"], Target("N(0, 1)", 0.001)) == excess(method["Adam, fixed v"], Target("N(0, 1)", 0.1)) == 0
    )


def test_chains_stay_for_a_time_proportional_to_the_root_of_the_second_moment():
    """Weighted by their step, samples of N(0, 1) have the right variance; unweighted, 1 + 1 / (1 + 2 * 0.02 * 25)."""
    step, window = 0.02, 25
    source = torch.Generator().manual_seed(0)
    theta = torch.randn(4096, generator=source, dtype=torch.float64)
    second, weights, samples = torch.ones_like(theta), [], []
    for index in range(800):
        second += (theta**2 - second) / window
        eta = step / second.sqrt()
        if index >= 400:
            weights.append(eta)
            samples.append(theta**2)
        noise = torch.randn(4096, generator=source, dtype=torch.float64)
        theta = theta - eta * theta + (2 * eta).sqrt() * noise
    weight, square = torch.stack(weights), torch.stack(samples)
    assert abs(float(square.mean()) - 1.5) < 0.1
    assert abs(float((weight * square).sum() / weight.sum()) - 1) < 0.03


# -- runs and pages ----------------------------------------------------------------------------------------------------


def test_a_single_run_replaces_its_own_cells_only(modules, runs, tmp_path):
    before = json.loads(json.dumps(runs))
    (tmp_path / "gaussians.json").write_text(json.dumps({"runs": runs}))
    words = ["--methods", "AdamW", "--steps", "0.05", "--places", "optimizer", "--chains", "16", "--scale", "tiny"]
    modules["run"].main([*words, "--out", str(tmp_path)])
    after = json.loads((tmp_path / "gaussians.json").read_text())["runs"]
    [changed] = [new for old, new in zip(before, after, strict=True) if old != new]
    assert (changed["optimizer"], changed["noise_in"], changed["step"]) == ("AdamW", "optimizer", 0.05)
    assert changed["command"].endswith('--methods "AdamW" --steps 0.05 --places optimizer --chains 16 --scale tiny')
    assert len(changed["cells"]) == 4
    assert (tmp_path / "gaussians.md").read_text() == modules["page"].describe(after)


def test_a_new_run_takes_its_place_in_the_order_of_the_tables(modules, runs):
    for index in (0, 5, len(runs) - 1):
        assert modules["run"].merge([*runs[:index], *runs[index + 1 :]], runs[index]) == runs


def test_settings_that_select_nothing_are_refused(modules, capsys):
    with pytest.raises(SystemExit):
        modules["run"].main(["--places", "gradient", "--steps", "0.001"])
    assert "no run has these settings" in capsys.readouterr().err


def test_all_runs_are_stored(modules, runs):
    keys = [(run["optimizer"], run["noise_in"], run["step"]) for run in runs]
    assert keys == [run.key for run in modules["run"].plan()]


def test_the_pages_agree_with_the_stored_numbers(modules, runs):
    command, page = "run: python -m studies.sampling.run --tables", modules["page"]
    assert page.describe(runs) == (RESULTS / "gaussians.md").read_text(encoding="utf-8"), command
    text = (ROOT / "docs" / "noise.md").read_text(encoding="utf-8")
    for name, block in page.BLOCKS.items():
        assert page.replaced(text, name, block(runs)) == text, command


def test_the_page_states_excess_variances_as_measured(modules, runs):
    def rows(table):
        cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        return {first: rest[:3] for first, *rest in cells}

    text = (ROOT / "docs" / "noise.md").read_text(encoding="utf-8")
    stated = rows(text[text.index("| optimizer | step 0.001 |") :].split("\n\n")[0])
    measured = rows(modules["page"].full_table(runs))
    names = ("SGD", "Adam", "Adam, b2 0.9999", "Adam, b2 0.99999", "RMSprop")
    for (row, numbers), name in zip(stated.items(), names, strict=True):
        assert [number.split()[0] for number in numbers] == measured[name], row
    assert measured["SGD, momentum 0.9"] == measured["SGD"]
    assert [numbers.split()[-1] for numbers in stated[list(stated)[3]]] == measured["Adam, fixed v"]


# -- what was measured -------------------------------------------------------------------------------------------------


def test_standard_errors_are_small(modules, runs):
    cells = [cell for cell in modules["page"].cells(runs) if cell.place == "optimizer"]
    assert max(cell.row[name] for cell in cells for name in ("stiff_error", "slow_error", "mean_error")) < 0.025


def test_cells_outside_of_five_percent_are_those_with_short_windows(modules, runs):
    """Every cell is right under SGD and with a fixed second moment; others if the window is long enough."""
    for cell in modules["page"].cells(runs):
        if cell.place != "optimizer":
            continue
        method = modules["page"]._METHODS[cell.optimizer]
        excess = modules["theory"].second_moment_excess(method, cell.target)
        assert abs(cell.row["mean"]) < 0.05
        if not 0.02 < excess < 0.05:  # between them a cell is at the limit
            assert cell.is_right == (excess < 0.02), cell


def test_the_excess_of_the_variance_is_the_predicted_one(modules, runs):
    for cell in modules["page"].cells(runs):
        method = modules["page"]._METHODS[cell.optimizer]
        if cell.place == "optimizer" and cell.target.shape == "N(0, 1)" and method.is_normalised:
            predicted = modules["theory"].second_moment_excess(method, cell.target)
            assert abs(cell.corrected[0] - 1 - predicted) < 0.03 + 0.1 * predicted, cell


def test_the_warning_about_short_windows_states_measured_numbers(modules, runs):
    found = [
        cell.row["stiff"]
        for cell in modules["page"].cells(runs)
        if (cell.optimizer, cell.place, cell.target.noise) == ("RMSprop", "optimizer", 0.0)
    ]
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.RMSprop(model.parameters())
    with pytest.warns(UserWarning, match=f"as {min(found):.1f} to {max(found):.1f} times"):
        repel(model, optimizer, SGLD(), groups=heads_by_hand(model, {"weight": ("q", 2)}), verbose=False)


@pytest.mark.slow
def test_the_study_gives_the_committed_numbers(modules, runs):
    """Tolerance 0.02, for other versions of torch; with the same one the numbers are equal."""
    stored = {(cell.optimizer, cell.place, cell.target): cell.row for cell in modules["page"].cells(runs)}
    for run in modules["run"].plan():
        if run.step == 0.05:
            for cell in modules["page"].cells([modules["run"].carry_out(run, 8192)]):
                expected = stored[cell.optimizer, cell.place, cell.target]
                assert all(abs(cell.row[name] - expected[name]) < 0.02 for name in ("stiff", "slow", "mean"))

"""A narrow translator trained with parts of the published rule, at toy size."""

import json
from pathlib import Path

import pytest

from tests.lab.systems.translation import digits
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")

MODEL = ("model.width=16", "model.depth=[2, 1]", "model.feed_forward=16", "model.dropout=0.1", "training.batch=300")


@pytest.fixture(scope="module")
def script():
    with study("studies.translation.encoder_tokens") as module:
        module.MODEL = MODEL
        module.AT, module.WARM_UP = (1, 2), 1
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits.make_data(tmp_path_factory.mktemp("data"), size=60) / "prepared"


def first_step(script, data, name):
    (point,) = script.train(script.ROWS[name], data, 1, 1)
    return {key: value for key, value in point.items() if key.startswith("norm/")}


@pytest.mark.parametrize(
    ("row", "repelled"),
    [
        ("published", {"encoder/qk", "encoder/v", "decoder/qk", "decoder/v", "cross/qk", "cross/v"}),
        ("published-qk", {"encoder/qk", "decoder/qk", "cross/qk"}),
        ("published-v", {"encoder/v", "decoder/v", "cross/v"}),
        ("published-encoder", {"encoder/qk", "encoder/v"}),
        ("published-encoder-v", {"encoder/v"}),
        ("published-decoder", {"decoder/qk", "decoder/v"}),
        ("published-cross", {"cross/qk", "cross/v"}),
    ],
)
def test_a_row_repels_what_its_name_says(script, data, row, repelled):
    """In the first step the other heads take the step of plain training."""
    plain, ours = (first_step(script, data, name) for name in ("plain", row))
    assert {name for name in plain if plain[name] != ours[name]} == {f"norm/{name}" for name in repelled}


def test_long_values_start_twice_as_long(script, data, monkeypatch):
    monkeypatch.setattr(script, "LR", 0.0)
    plain, ours = (first_step(script, data, name) for name in ("plain", "long-v"))
    assert {name: ours[name] / plain[name] for name in plain} == pytest.approx(
        {name: 2.0 if name == "norm/encoder/v" else 1.0 for name in plain}
    )


def test_tables_of_finished_rows(script, data, tmp_path, capsys):
    words = ["--data", data, "--records", tmp_path / "records", "--results", tmp_path / "results"]

    def call(*more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["encoder_tokens", *map(str, [*words, *more])])
            script.main()
        return capsys.readouterr().out

    call("--rows", "plain", "published-v", "--steps", "4", "--every", "2")
    points = json.loads((tmp_path / "records" / "plain.json").read_text())
    assert [point["step"] for point in points] == [2, 4]
    assert "is finished" in call("--rows", "plain", "--steps", "4", "--every", "2")
    printed = call("--tables")
    assert printed.strip() == (tmp_path / "results" / "encoder_tokens.md").read_text().strip()
    lines = [line for line in printed.splitlines() if line.startswith("| plain")]
    assert lines[1] == f"| plain |  | {points[0]['token_cosine']:.3f} |"
    assert (tmp_path / "results" / "encoder_tokens-token_cosine.svg").is_file()


def test_the_page_of_results_has_the_rows_of_the_records(script):
    results = Path(__file__).resolve().parents[2] / "results" / "translation"
    page = (results / "README.md").read_text()
    names = [name for name in script.ROWS if (results / "encoder_tokens" / f"{name}.json").is_file()]
    assert {"plain", "published", "published-encoder-v", "long-v"} <= set(names)
    for name in names:
        points = json.loads((results / "encoder_tokens" / f"{name}.json").read_text())
        cosines = ", ".join(f"{point['token_cosine']:.3f}" for point in points if point["step"] % 1000 == 0)
        cells = [script.ROWS[name].label, cosines, f"{points[-1]['entropy/cross']:.2f}"]
        assert f"| {' | '.join([*cells, format(points[-1]['norm/encoder/v'], '.1f')])} |" in page

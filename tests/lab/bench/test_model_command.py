"""The command `repulsive bench --model`: its table, its JSON and its errors."""

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from rich.console import Console

from repulsive.cli.app import run
from repulsive.cli.bench import bench
from repulsive.lab.bench.model_cost import CostOptions, measure_model
from repulsive.lab.bench.model_table import print_costs
from repulsive.lab.bench.presets import Preset
from repulsive.lab.bench.rules import SAME, available_cases
from tests.lab.bench.tiny_models import TINY

pytest.importorskip("transformers")


def run_command(*words):
    return run(["bench", "--device", "cpu", *words])


def test_the_command(tmp_path, capsys, monkeypatch):
    whole = Preset.build
    tiny = lambda self, device, **more: whole(self, device, **{**more, "overrides": TINY["bert-base"]})  # noqa: E731
    monkeypatch.setattr(Preset, "build", tiny)
    path = tmp_path / "new" / "bert.json"
    given = ("--model", "bert-base", "--layers", "1", "--batch", "2", "--length", "16", "--seconds", "0")
    assert run_command(*given, "--rule", "paper", "--json", str(path), "--full") == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("bert-base: milliseconds") :].splitlines()
    assert max(map(len, table[:-1])) <= 80 and "…" not in shown
    assert any(line.split()[:1] == ["paper"] for line in table) and "noise floor" in shown
    assert "tokens per second, peak memory" in shown and "2 x 16 tokens per step, AdamW, float32" in shown
    facts = json.loads(path.read_text())
    assert facts["settings"]["rules"] == ["paper"] and facts["versions"]["torch"] == torch.__version__
    assert len(facts["turns"]["paper"]) == 6 and facts["date"] and facts["machine"]


@pytest.mark.slow
def test_four_columns_by_default_and_json_on_stdout(capsys, monkeypatch):
    whole = Preset.build
    tiny = lambda self, device, **more: whole(self, device, **{**more, "overrides": TINY["bert-base"]})  # noqa: E731
    monkeypatch.setattr(Preset, "build", tiny)
    given = ("--model", "bert-base", "--layers", "1", "--batch", "2", "--length", "16", "--seconds", "0")
    assert run_command(*given, "--rule", "paper") == 0
    shown = capsys.readouterr().out
    assert ["rule", "plain", "repelled", "ratio"] in [line.split() for line in shown.splitlines()]
    assert "95 % interval" not in shown and "noise floor" in shown and "--full" in shown
    assert run_command(*given, "--rule", "paper", "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    assert "paper" in facts["results"] and facts["settings"]["model"] == "bert-base"


@pytest.mark.slow
def test_the_table_is_the_same_from_json():
    overrides = TINY["vit-b16"]
    facts = measure_model(
        CostOptions("vit-b16", ("sgld",), rounds=6, steps=1, layers=1, batch=1, overrides=overrides), lambda line: None
    )
    facts["results"]["sgld"] |= {"act_every": 4, "own_graph": True}
    for name, row in facts["results"].items():
        row["peak_bytes"] = 12_345_678_901 + 4_560_000 * (name == "sgld")  # as on a GPU: one more column
        row["seconds"], row["per_second"] = 123.45678, 1_234_567.0
    texts = []
    for source in (facts, json.loads(json.dumps(facts))):
        console = Console(width=80, file=StringIO())
        print_costs(source, console, full=True)
        texts.append(console.file.getvalue())
    assert texts[0] == texts[1] and "peak memory 12.35 GB" in texts[0] and "images/s" in texts[0]
    rows = [line.split() for line in texts[0].splitlines()]
    assert next(row[-1] for row in rows if row[:1] == ["sgld"]) == "4.6"
    assert "sgld: acts in one of 4 steps" in texts[0] and "sgld: compiled again" in texts[0]
    assert max(map(len, texts[0].splitlines())) <= 80 and "…" not in texts[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "bert-bse"), "did you mean 'bert-base'?"),
        (("--model", "gpt2", "--rule", "spere"), "did you mean 'sphere'?"),
        (("--model", "vit-b16", "--length", "9"), "leave --length out"),
        (("--rule", "paper"), "this option needs --model"),
        (("--seconds", "3"), "this option needs --model"),
        (("--model", "gpt2", "--tokens", "64"), "cannot be combined with --model"),
        (("--model", "gpt2", "--rounds", "5"), "at least 6 rounds"),
        (("--model", "gpt2", "--layers", "0"), "--layers"),
        (("--model", "gpt2", "--compile", "--cuda-graphs"), "--cuda-graphs needs --compile and a GPU"),
        (("--compile", "--cuda-graphs"), "this option needs --model"),
    ],
)
def test_a_mistake_ends_with_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(*words) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_without_transformers_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run_command("--model", "gpt2") == 2
    assert "python -m pip install -e '.[transformers]'" in capsys.readouterr().err


def test_help_loads_no_optional_package():
    code = (
        "import sys; from repulsive.cli.app import run; run(['bench', '--help']);"
        "print([name for name in ('transformers', 'accelerate', 'optuna', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]" and "--model" in done.stdout


def test_help_and_docs_name_every_case():
    (option,) = get_type_hints(bench, include_extras=True)["rule"].__metadata__
    page = (Path(__file__).resolve().parents[3] / "docs" / "cost.md").read_text()
    named = set(re.split(r"[ ,;:.]+", option.help))
    assert {name for name in available_cases()[0] if name not in named} == set()
    listed = page[page.index("- `--rule` takes the names of rules") :]
    assert {name for name in (*available_cases()[0], *SAME) if f"`{name}`" not in listed} == set()

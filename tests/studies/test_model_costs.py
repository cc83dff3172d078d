"""Cost in transformers models: processes measure one at a time, and the table agrees with the files."""

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "results" / "bench").glob("models-*.json"))


def test_the_table_is_up_to_date(tmp_path):
    for path in FILES:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with study("studies.speed.model_tables") as tables:
        written = tables.write_table(tmp_path).read_text()
    assert written == (ROOT / "results" / "bench" / "models.md").read_text(), (
        "run: python -m studies.speed.model_tables"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_host_and_device_add_up_to_the_bound(path):
    results = json.loads(path.read_text())["results"]
    with study("studies.speed.model_tables") as tables:
        bounds = {name: tables.parts_of(row) for name, row in results.items() if row["bound"] is not None}
    assert bounds
    for name, parts in bounds.items():
        assert 1 + sum(parts) / results["plain"]["seconds"] == pytest.approx(results[name]["bound"], rel=1e-9)


def measure(queue, name, late, path):
    def note(event):
        with path.open("a") as file:
            file.write(f"{name} {event}\n")

    time.sleep(late)
    note("is ready")
    queue.wait(name)
    note("begins")
    time.sleep(0.05)
    note("ends")


def test_processes_measure_one_at_a_time_after_all_are_ready(tmp_path):
    path = tmp_path / "log"
    with study("studies.speed.models") as models:
        queue = models.Queue(tmp_path, count=3, patience=600)
        queue.arrive("failed")
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=measure, args=(queue, name, late, path)) for name, late in (("a", 0.0), ("b", 0.3))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    ready, turns = (path.read_text().splitlines()[part] for part in (slice(2), slice(2, None)))
    assert sorted(ready) == ["a is ready", "b is ready"]
    one, other = (["a begins", "a ends"], ["b begins", "b ends"])
    assert turns in (one + other, other + one)


def test_files_of_an_earlier_run_are_not_reported_as_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "models-llama.json").write_text("{}")
    with study("studies.speed.models") as models:

        def measure_one(_target, arguments):
            (arguments.out / "models-gpt2.json").write_text("{}")  # the other model fails

        monkeypatch.setattr(models, "measure_in_turn", measure_one)
        models.main(["--models", "gpt2", "llama", "--device", "cpu", "--out", str(tmp_path)])
    assert json.loads(capsys.readouterr().out) == {"written": ["models-gpt2.json"]}


def test_the_first_steps_count_once_in_a_training():
    seconds = {"plain before": [1.0, 1.0], "plain after": [1.0], "active": [1.5, 1.1], "ended": [1.02]}
    with study("studies.speed.first_steps") as first:
        numbers = first.summary({"settings": {"model": "gpt2"}, "seconds": seconds})
    assert numbers["active / plain"] == pytest.approx(1.3)
    assert numbers["training / plain, free after the end"] == pytest.approx(1 + 0.3 * 500 / 10_000)
    assert numbers["training / plain"] == pytest.approx((500 * 1.3 + 9_500 * 1.02) / 10_000)


def test_the_parts_of_an_interrupted_run_are_kept(tmp_path, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    with study("studies.speed.first_steps") as first:
        preset = SimpleNamespace(
            size=lambda device, batch: (1, 4),
            build=lambda device, layers, length: GPT2LMHeadModel(
                GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=length)
            ),
            inputs=lambda config, batch, length, device: dict.fromkeys(
                ("input_ids", "labels"), torch.arange(length).expand(batch, -1)
            ),
        )
        monkeypatch.setattr(first, "find_preset", lambda name: preset)
        arguments = argparse.Namespace(device="cpu", batch=1, layers=1, steps=2, profile=False, out=tmp_path)
        kept = []

        def keep(facts):
            first.save(tmp_path / "first-steps-gpt2.json", facts)
            kept.append(list(facts["seconds"]))
            if len(kept) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            first._measure("gpt2", arguments, lambda: None, keep)
        assert kept == [["plain before"], ["plain before", "active"]]
        first.write_table(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["first-steps-gpt2.json"]  # no table of half a run
    assert list(json.loads((tmp_path / "first-steps-gpt2.json").read_text())["seconds"]) == kept[-1]


@pytest.mark.slow
def test_hooks_on_a_cpu_count_against_a_plain_step():
    with study("studies.speed.cpu_hooks") as hooks:
        facts = hooks.measure("bert-base", ["sphere"], layers=1, steps=1, turns=1)
    cost = facts["results"]["sphere"]
    assert 0 < cost["average"] == pytest.approx((cost["ratio"] - 1) * facts["plain"][0])

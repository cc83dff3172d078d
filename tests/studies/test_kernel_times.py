"""The study of Triton launches, at toy size in Triton's interpreter. No speed is asserted."""

import json

import pytest
import torch

pytest.importorskip("triton")

from repulsive import find_heads
from repulsive.lab.bench.presets import PRESETS
from repulsive.repulsion.backends import launch_settings
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels():
    with study("studies.speed.kernels") as module:
        yield module


@pytest.fixture(scope="module")
def settings(kernels):
    with study("studies.speed.kernel_settings") as module:
        yield module


def test_every_launch_is_measured_and_candidates_are_compared(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_settings, "SPLITS", 1)
    some = {"BLOCK": 16, "num_warps": 1, "num_stages": 1}
    good = kernels.Candidate("combine", {**some, "programs": 3})
    refused = kernels.Candidate("gram, solve", {**some, "BLOCK": 3})  # not a power of two
    by_column = kernels.Candidate("gram, solve", {"BLOCK": 32, "WIDTH": 1, "programs": 3, "BY_COLUMN": 1})
    monkeypatch.setitem(kernels.CANDIDATES, 2, [good, refused, by_column])
    monkeypatch.setattr(kernels, "RULES", ("spos-paper", "recommended"))
    monkeypatch.setattr(kernels, "TUNED", {"paper": ("gram, solve", "combine")})
    out = tmp_path / "kernels.json"
    words = [
        "--models",
        "toy",
        "--tune",
        "toy",
        "--layers",
        "1",
        "--repeats",
        "1",
        "--workers",
        "0",
        "--seconds",
        "600",
    ]
    kernels.main([*words, "--device", DEVICE, "--out", str(out)])
    case = json.loads(out.read_text())["cases"]["toy"]
    size = 3 * 16 * 16 * 4
    assert case["facts"]["weights"] == {"groups": 3, "heads": 2, "bytes": size}
    passes = {name: found["bytes"] / size for name, found in case["launches"].items()}
    assert passes == {
        **{"gram": 1, "gram and norms of gradients": 2, "solve": 0, "gram, solve": 1},
        **{"combine": 3, "combine with noise": 3, "step noise": 5},
    }
    assert {rule: found["bytes"] / size for rule, found in case["updates"].items()} == {
        "spos-paper": 4,
        "recommended": 5,
    }
    assert case["candidates"][good.name]["error"] < 1e-6 and "gain" in case["candidates"][good.name]
    assert "failed" in case["candidates"][refused.name]
    if launch_settings.has_tuples():
        assert case["candidates"][by_column.name]["error"] < 1e-6
    assert [found["error"] < 1e-6 for found in case["paper"].values()] == [True] * 3
    assert case["best"]["paper"]["us"] > 0


def test_nothing_is_tried_after_the_end(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_settings, "SPLITS", 1)
    monkeypatch.setattr(kernels, "RULES", ())
    monkeypatch.setattr(kernels, "TUNED", {"paper": ("gram, solve", "combine")})
    out = tmp_path / "kernels.json"
    words = ["--models", "toy", "--tune", "toy", "--layers", "1", "--repeats", "1", "--workers", "0", "--seconds", "0"]
    kernels.main([*words, "--device", DEVICE, "--out", str(out)])
    case = json.loads(out.read_text())["cases"]["toy"]
    assert case["candidates"] and {found["failed"] for found in case["candidates"].values()} == {"no time left"}
    assert case["best"]["paper"]["settings"] == "default"


def test_settings_apply_within_their_context(settings):
    before = json.dumps({name: value for name, value in vars(launch_settings).items() if name.isupper()})
    gram = {"BLOCK": 32, "num_warps": 1, "num_stages": 4, "programs": 72, "CHUNK": 16, "PRECISION": "ieee"}
    noisy = {"BLOCK": 16, "num_warps": 4, "num_stages": 1, "programs": 36}
    with settings.applied({"gram, solve": gram, "combine with noise": noisy}, 16):
        assert launch_settings.GRAM[16] == {"BLOCK": 32, "num_warps": 1, "num_stages": 4}
        assert launch_settings.combine_settings(16, True) == {"BLOCK": 16, "num_warps": 4, "num_stages": 1}
        assert launch_settings.combine_settings(16, False) == launch_settings.COMBINE[16]
        assert launch_settings.SOLVE[16] == {"CHUNK": 16, "num_warps": 2}
        sizes = (36, 49_152, 16, torch.device("cpu"))
        assert [launch_settings.splits_per_slice(name, *sizes) for name in ("gram", "combine with noise")] == [2, 1]
        assert launch_settings.precision(16) == "ieee" and launch_settings.precision(32) == "tf32x3"
    by_column = {"BLOCK": 128, "num_warps": 1, "programs": 12, "WIDTH": 4, "BY_COLUMN": 1}
    with settings.applied({"gram, solve": by_column}, 16):
        assert launch_settings.BY_COLUMN[16]["gram"] == {"BLOCK": 128, "num_warps": 1, "programs": 12, "WIDTH": 4}
        with settings.applied({"gram, solve": gram}, 16):
            assert launch_settings.column_settings("gram", 12) is None
            assert launch_settings.column_settings("combine", 12) is not None
    assert json.dumps({name: value for name, value in vars(launch_settings).items() if name.isupper()}) == before


@pytest.mark.parametrize(
    ("name", "preset"), [(n, n) for n in ("bert-base", "gpt2", "llama")] + [("bert-base", "vit-b16")]
)
def test_shapes_are_those_of_the_models(name, preset, kernels):
    pytest.importorskip("transformers")
    model = PRESETS[preset].build("meta")
    expected = [(group.num_heads, group.dim) for group in find_heads(model)]
    shape = kernels.SHAPES[name]
    found = [(group.num_heads, group.dim) for group in shape.groups(torch.device("cpu"), layers=1)] * shape.layers
    assert sorted(found) == sorted(expected)

"""Dummy inputs of the survey: repairs after a model refuses its inputs, and updating a table."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from studies.survey import run
from studies.survey.dummies import example_inputs, repaired
from studies.survey.examine import outcome
from studies.survey.table import write_table
from torch import Tensor, nn

IMAGE, AUDIO, WIDTH = 5, 6, 4


def config(**settings: Any) -> Any:
    def text() -> Any:
        return SimpleNamespace(hidden_size=WIDTH)

    return SimpleNamespace(image_token_id=IMAGE, audio_token_id=AUDIO, get_text_config=text, **settings)


class Grid(nn.Module):
    """A model of images as patches with a grid: it skips the images if they are not given, as many models do."""

    def forward(self, input_ids: Tensor, pixel_values: Any = None, image_grid_thw: Any = None) -> None:
        if pixel_values is None:
            return
        if image_grid_thw is None or pixel_values.shape != (int(image_grid_thw.prod(1).sum()), 3 * 8 * 8):
            raise TypeError("'NoneType' object is not subscriptable")
        check_tokens("Image", input_ids, IMAGE, len(pixel_values) // 4)


class Tiles(nn.Module):
    """A model that takes several images per text."""

    def forward(self, input_ids: Tensor, pixel_values: Any = None) -> None:
        if pixel_values is not None:
            if pixel_values.ndim != 5:
                raise ValueError("not enough values to unpack (expected 5, got 4)")
            check_tokens("Image", input_ids, IMAGE, 3 * pixel_values.shape[:2].numel())


class Sound(nn.Module):
    """A model of sound that needs the mask of time steps."""

    def forward(self, input_ids: Tensor, input_features: Any = None, input_features_mask: Any = None) -> None:
        if input_features is not None:
            check_tokens("Audio", input_ids, AUDIO, int(input_features_mask.sum()) // 8)


class Sizes(nn.Module):
    """A model that is given the size of each image, and rejects the square images of its configuration."""

    def forward(self, input_ids: Tensor, pixel_values: Any = None, image_sizes: Any = None) -> None:
        if pixel_values is not None:
            check_tokens("Image", input_ids, IMAGE, int((image_sizes // 14).prod(1).sum()))


def check_tokens(kind: str, input_ids: Tensor, token: int, features: int) -> None:
    count = int((input_ids == token).sum())
    if count != features:
        raise ValueError(
            f"{kind} features and {kind.lower()} tokens do not match, tokens: {count}, features: {features}"
        )


@pytest.mark.parametrize(
    ("model", "settings", "reaches"),
    [
        (Grid(), {"patch_size": 8}, "image_grid_thw"),
        (Tiles(), {"image_size": 32}, "pixel_values"),
        (Sound(), {"num_mel_bins": 8}, "input_features_mask"),
        (Sizes(), {"image_size": 1540}, "image_sizes"),
    ],
    ids=["grid", "several images", "sound", "sizes"],
)
def test_repairs_lead_to_inputs_that_reach_every_tower(
    model: nn.Module, settings: dict[str, Any], reaches: str
) -> None:
    settings = config(**settings)
    tries = list(example_inputs(model, settings))[:1]  # the first has all modalities; later ones are text alone
    for _ in range(30):
        inputs = tries.pop(0)
        try:
            model(**inputs)
            break
        except (TypeError, ValueError, AttributeError) as error:
            tries = [*repaired(inputs, model, settings, error), *tries]
    else:
        pytest.fail("no inputs are accepted")
    assert reaches in inputs and (inputs["input_ids"] == (AUDIO if reaches.startswith("input") else IMAGE)).any()


def test_an_update_repeats_some_architectures_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    results = [outcome(name, status, "") for name, status in (("a", "table"), ("b", "partly"), ("c", "none"))]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    write_table(tmp_path, "transformers", results, versions | {"date": "2020-01-01"})
    monkeypatch.setattr(run, "architectures", list)
    monkeypatch.setattr(run, "limited", lambda name, *_: outcome(name, "table", "again", groups=3, verified=3))
    options = Namespace(out=tmp_path, library="transformers", update=["partly"], seconds=1, gigabytes=1)
    run.update(options)
    table = json.loads((tmp_path / "transformers.json").read_text())
    assert [each["status"] for each in table["results"]] == ["table", "table", "none"]
    assert table["versions"]["date"] == "2020-01-01" and table["versions"]["repeated"]["architectures"] == ["b"]
    text = (tmp_path / "transformers.md").read_text()
    assert "Of 2 that have attention, build and run, **2 (100 %)" in text and "1 were repeated until" in text
    run.update(Namespace(out=tmp_path, library="transformers", update=["a"], seconds=1, gigabytes=1))
    table = json.loads((tmp_path / "transformers.json").read_text())
    assert table["versions"]["repeated"]["architectures"] == ["a", "b"]
    write_table(tmp_path, "transformers", results, versions | {"transformers": "0.1", "date": "2020-01-01"})
    with pytest.raises(SystemExit, match="another version of transformers"):
        run.update(options)

"""Recipe files: valid ones fill a dataclass, invalid ones raise an error that names the key."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from repulsive.errors import ConfigError
from repulsive.lab.engine.config import as_tables, build
from repulsive.lab.engine.recipe_tables import apply_changes, differences, read


@dataclass(frozen=True)
class Optimizer:
    name: Literal["adam", "sgd"] = "adam"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr={self.lr} must be positive")


@dataclass(frozen=True)
class Recipe:
    data: Path
    epochs: int = 3
    shuffle: bool = True
    alpha: float | Literal["auto"] = 0.01
    layers: str | list[int] = "all"
    note: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)


def load(path, changes=()):
    return build(Recipe, apply_changes(read(path), changes), source=str(path))


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_filling_extending_and_setting(tmp_path):
    write(tmp_path, "base.toml", 'data = "here"\nepochs = 5\n[optimizer]\nlr = 1\nbetas = [0.9, 0.98]\n')
    child = write(tmp_path, "child.toml", 'extends = "base.toml"\nalpha = "auto"\n[optimizer]\nname = "sgd"\n')
    loaded = load(child, ["optimizer.lr=0.5", "shuffle=false", "layers=[0, 2]", "note=hello there"])
    assert loaded == Recipe(Path("here"), 5, False, "auto", [0, 2], "hello there", Optimizer("sgd", 0.5, (0.9, 0.98)))
    assert build(Recipe, as_tables(loaded)) == loaded
    assert type(load(child).optimizer.lr) is float


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs = 3", ["data", "must be given"]),
        ('data = "x"\nepoch = 3', ["unknown key 'epoch'", "did you mean 'epochs'"]),
        ('data = "x"\n[optimizer]\nlearning = 1', ["optimizer", "unknown key 'learning'", "known: name, lr"]),
        ('data = "x"\nepochs = "3"', ["epochs", "must be int", "'3'"]),
        ('data = "x"\nepochs = true', ["epochs", "must be int"]),
        ('data = "x"\nepochs = 2.5', ["epochs", "must be int"]),
        ('data = "x"\nshuffle = 1', ["shuffle", "must be bool"]),
        ('data = "x"\nalpha = "always"', ["alpha", "must be float", "auto"]),
        ('data = "x"\noptimizer = 3', ["optimizer", "must be a table"]),
        ('data = "x"\n[optimizer]\nname = "adm"', ["optimizer: name", "did you mean 'adam'"]),
        ('data = "x"\n[optimizer]\nbetas = [0.9]', ["betas", "must have 2 entries"]),
        ('data = "x"\n[optimizer]\nbetas = [0.9, "a"]', ["betas[1]", "must be float"]),
        ('data = "x"\n[optimizer]\nlr = -1', ["optimizer", "must be positive"]),
        ("data = ", ["is not TOML"]),
        ('extends = "other.toml"', ["other.toml", "cannot be read"]),
        ("extends = 3", ["extends"]),
        ('extends = "recipe.toml"', ["extends itself"]),
    ],
)
def test_mistakes_are_named(text, words, tmp_path):
    path = write(tmp_path, "recipe.toml", text)
    with pytest.raises(ConfigError) as raised:
        load(path)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value).strip()


@pytest.mark.parametrize("change", ["epochs", "=3", "epochs.deep=3", "optimizer.lrr=1"])
def test_wrong_changes(change, tmp_path):
    path = write(tmp_path, "recipe.toml", 'data = "x"\nepochs = 1')
    with pytest.raises(ConfigError):
        load(path, [change])


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(b'\xef\xbb\xbfdata = "x"\r\nepochs = 4\r\n')
    assert load(path).epochs == 4


def test_binary_and_missing_files(tmp_path):
    path = tmp_path / "recipe.toml"
    with pytest.raises(ConfigError, match="No such file"):
        read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        read(path)


def test_differences_between_recipes():
    one = {"seed": 0, "data": {"folder": "here"}, "model": {"heads": 3, "width": [1, 2]}, "note": None}
    other = {"seed": 0, "data": {"folder": "there"}, "model": {"heads": 4, "width": [1, 2]}}
    assert differences(one, one) == []
    assert differences(one, other) == ["data.folder", "model.heads", "note"]
    assert differences(other, one, ignore=["data.folder", "note"]) == ["model.heads"]

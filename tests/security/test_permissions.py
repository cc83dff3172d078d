"""Weights in a user's folder get the permissions that the umask gives, as any other file does."""

import os
import stat

import pytest
import torch

from repulsive.diagnostics.prune import save_pruned
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.safety.permissions import ordinary_permissions

safetensors = pytest.importorskip("safetensors.torch")

WEIGHTS = {"a": torch.zeros(2)}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o027, 0o077])
def expected(request):
    """A umask, and the permissions that it gives new files."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(folder):
    """The permissions of all files below a folder."""
    return {mode(path) for path in folder.rglob("*") if path.is_file()}


def test_new_weights_follow_the_umask(tmp_path, expected):
    folder = tmp_path / "new"
    with ordinary_permissions(folder):
        folder.mkdir()
        safetensors.save_file(WEIGHTS, folder / "model.safetensors")
    assert mode(folder / "model.safetensors") == expected
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_other_files_and_replaced_weights_keep_their_permissions(tmp_path):
    """Whoever made the weights private does not publish them by saving again."""
    private, other, secret = (tmp_path / name for name in ("model.safetensors", "other.safetensors", "secret.txt"))
    for path, value in ((private, 0o640), (other, 0o600), (secret, 0o600)):
        path.write_bytes(b"")
        path.chmod(value)
    with ordinary_permissions(tmp_path):
        safetensors.save_file(WEIGHTS, private)
    assert [mode(path) for path in (private, other, secret)] == [0o640, 0o600, 0o600]


def test_the_target_of_a_link_keeps_its_permissions(tmp_path):
    target = tmp_path / "target"
    target.write_text("")
    target.chmod(0o600)
    (tmp_path / "folder").mkdir()
    with ordinary_permissions(tmp_path / "folder"):
        (tmp_path / "folder" / "model.safetensors").symlink_to(target)
    assert mode(target) == 0o600


def test_pruned_models_follow_the_umask(tmp_path, expected):
    save_pruned(Transformer(TransformerConfig.tiny(20)), tmp_path / "lab")
    assert modes(tmp_path / "lab") == {expected}


def test_pruned_transformers_models_follow_the_umask(tmp_path, expected):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    save_pruned(transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes)), tmp_path / "bert")
    assert modes(tmp_path / "bert") == {expected}

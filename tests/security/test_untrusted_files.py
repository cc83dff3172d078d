"""Attacks by untrusted files: pickles, paths and links that leave a folder, XML, recipes and archives."""

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import torch

from repulsive.errors import CheckpointError, ConfigError, DataError
from repulsive.lab.engine.built_in import find, read_recipe
from repulsive.lab.engine.checkpoint import Checkpoints, load
from repulsive.lab.systems.classification import age
from repulsive.lab.systems.glue.model import load_encoder, make_encoder
from repulsive.lab.systems.graphs.agenda import read_json_graphs
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.text import documents, lines
from repulsive.lab.text.folders import MANIFEST, write_folder
from repulsive.lab.text.prepared import Prepared
from tests.lab.text.test_prepared import small


class Trap:
    """Unpickling it creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickled_weights_run_no_code(tmp_path):
    make_encoder("tiny", 20).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for save in (lambda x, to: torch.save(x, to), lambda x, to: to.write_bytes(pickle.dumps(x))):
        save({"weight": Trap(tmp_path / "caught")}, tmp_path / "model" / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin: cannot be read"):
            load_encoder(tmp_path / "model")
        assert not (tmp_path / "caught").exists()


def renamed(folder, old, new):
    """List a file under another name in the manifest, with its correct checksum."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][new] = manifest["files"].pop(old)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["../outside.safetensors", "..", "sub/train.safetensors", "", "/etc/hostname"])
def test_a_manifest_lists_only_files_in_its_folder(tmp_path, name):
    small(tmp_path / "data").save()
    (tmp_path / "outside.safetensors").write_bytes((tmp_path / "data" / "train.safetensors").read_bytes())
    renamed(tmp_path / "data", "train.safetensors", name)
    with pytest.raises(DataError, match="which is not a file of its folder"):
        Prepared.load(tmp_path / "data")


def test_links_out_of_a_prepared_folder_are_refused(tmp_path):
    folder = small(tmp_path / "data").save().folder
    file = folder / "dev.safetensors"
    file.rename(folder / "kept")
    file.symlink_to("kept")
    assert Prepared.load(folder).parts  # a link within the folder is allowed
    file.unlink()
    (folder / "kept").rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="a link that leads out of its folder"):
        Prepared.load(folder)


def test_links_out_of_a_checkpoint_are_refused(tmp_path):
    path = Checkpoints(tmp_path / "run").save(3, {"model": {"x": torch.ones(2)}})
    assert load(path)[0] == 3
    (path / "state.json").rename(tmp_path / "state.json")
    (path / "state.json").symlink_to(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match="a link that leads out"):
        load(path)


def test_writing_to_a_linked_folder_replaces_its_target(tmp_path):
    write_folder(tmp_path / "real", {"a": b"1"}, {})
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", {"b": b"2"}, {})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "b").read_bytes() == b"2"
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}  # nothing is left behind


def test_the_name_of_an_author_cannot_be_a_path(tmp_path):
    document = "<author><document>secret</document></author>"
    (tmp_path / "outside.xml").write_text(document)
    (tmp_path / "pan").mkdir()
    (tmp_path / "pan" / "x.xml").write_text(document.replace("secret", "text"))
    (tmp_path / "pan" / "truth.txt").write_text("../outside:::F:::18-24\nx:::F:::18-24\n")
    with pytest.warns(UserWarning, match="is not the name of an author's file"):
        assert age.read_age(tmp_path / "pan").texts == ["text"]


def test_xml_entities_are_refused(tmp_path):
    (tmp_path / "secret").write_text("secret")
    bomb = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 20))
    kinds = {
        "x": f'<!DOCTYPE a [<!ENTITY e SYSTEM "file://{tmp_path}/secret">]><a><document>&e;</document></a>',
        "y": f'<!DOCTYPE a [<!ENTITY a0 "lol">{bomb}]><a><document>&a19;</document></a>',
        "z": "<a><document>text</document></a>",
    }
    for name, text in kinds.items():
        (tmp_path / f"{name}.xml").write_text(text)
    (tmp_path / "truth.txt").write_text("".join(f"{name}:::F:::18-24\n" for name in kinds))
    with pytest.warns(UserWarning, match="not XML"):
        assert age.read_age(tmp_path).texts == ["text"]


def test_a_recipe_by_name_is_one_of_the_package(tmp_path):
    file = find("yelp/svgd").method
    assert file.is_file()
    for name in ("../recipes/yelp/svgd", "../methods/svgd", str(file.with_suffix(""))):
        with pytest.raises(ConfigError, match="nor a built-in recipe"):
            read_recipe(name)


@pytest.mark.parametrize(
    "change", ["method.rule=os:system", "method.kernel=builtins.eval", "task=os.system", "optimizer.name=torch.SGD"]
)
def test_a_recipe_cannot_name_a_python_object(change):
    with pytest.raises(ConfigError, match="must be one of"):
        open_recipe("yelp/svgd", [change])


def test_archives_are_read_and_never_unpacked(tmp_path, monkeypatch):
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, kind in (
            ("../escaped.txt", tarfile.REGTYPE),
            ("/tmp/absolute.txt", tarfile.REGTYPE),
            ("link.txt", tarfile.SYMTYPE),
            ("pipe.txt", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, 4 if kind == tarfile.REGTYPE else 0, "/etc/passwd"
            archive.addfile(info, io.BytesIO(b"text"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar.gz").write_bytes(written.getvalue())
    monkeypatch.chdir(tmp_path / "in")
    assert list(documents.read_documents(Path("a.tar.gz"))) == [["text"], ["text"]]
    with pytest.raises(DataError, match="has no file"):
        read_json_graphs("a.tar.gz", member="passwd")
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "a.tar.gz"]


def test_a_line_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_LONGEST", 1 << 16)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"fine\n" + b"0" * (1 << 22)))
    with pytest.raises(DataError, match="line 2: longer than 65,536 bytes"):
        list(lines.read_lines(tmp_path / "bomb.gz"))

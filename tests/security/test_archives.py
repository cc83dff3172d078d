"""Archives that unpack to far more than their size are refused with one line, and the limit can be raised."""

import gzip
import io
import lzma
import tarfile

import pytest

from repulsive.cli.app import run
from repulsive.errors import ConfigError, DataError
from repulsive.lab.systems.graphs import agenda
from repulsive.lab.text import documents, lines
from repulsive.safety import limits

LINE = b"the same line again and again\n"
MESSAGE = r"unpacks to more than .* GiB, the limit for a file of its size; if you trust it, set REPULSIVE_MOST_UNPACKED"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Use a limit of 1 MiB instead of 1 GiB, to keep the tests fast."""
    monkeypatch.setattr(limits, "_GIB", 1 << 20)


def tar(**files):
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return written.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_text_that_unpacks_to_too_much(tmp_path, monkeypatch, pack):
    path = tmp_path / "bomb"
    path.write_bytes(pack(LINE * (4 << 20 >> 4)))
    with pytest.raises(DataError, match=MESSAGE):
        list(lines.read_lines(path))
    monkeypatch.setenv(limits.UNPACKED, "64")
    assert len(list(lines.read_lines(path))) == 4 << 20 >> 4


def test_an_archive_inside_an_archive(tmp_path, monkeypatch):
    inner = tar(a_txt=LINE * 20_000, b_txt=LINE * 20_000)
    many = {f"x{i}_gz": gzip.compress(inner) for i in range(3)}
    (tmp_path / "bomb.tar.xz").write_bytes(lzma.compress(tar(**many)))
    with pytest.raises(DataError, match=MESSAGE):
        list(documents.read_documents(tmp_path / "bomb.tar.xz"))
    monkeypatch.setenv(limits.UNPACKED, "64")
    assert len(list(documents.read_documents(tmp_path / "bomb.tar.xz"))) == 6


def test_a_list_of_graphs(tmp_path):
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(tar(x_json=b"[" + b" " * (4 << 20))))
    with pytest.raises(DataError, match=MESSAGE):
        agenda.read_json_graphs(tmp_path / "bomb.tar.gz", member="x.json")


def test_ordinary_files_are_below_the_limit(tmp_path):
    text = "".join(f"{i * 7919 % 10007} words of line {i}\n" for i in range(20_000)).encode()
    (tmp_path / "a.xz").write_bytes(lzma.compress(text))
    assert len(list(lines.read_lines(tmp_path / "a.xz"))) == 20_000
    (tmp_path / "plain").write_bytes(LINE * (4 << 20 >> 4))  # not compressed, so there is no limit
    assert len(list(lines.read_lines(tmp_path / "plain"))) == 4 << 20 >> 4


def test_on_the_command_line_it_is_one_line(tmp_path, capsys):
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.tsv.gz").write_bytes(gzip.compress(b"label\ttext\n" + b"1\tmore of the same\n" * 300_000))
    words = ["prepare", "tsv", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--tokenizer", "regex"]
    assert run(words) == 2
    error = capsys.readouterr().err
    assert limits.UNPACKED in error and error.count("\n") == 1


def test_a_limit_must_be_a_positive_number(tmp_path, monkeypatch):
    monkeypatch.setenv(limits.UNPACKED, "-1")
    (tmp_path / "a.gz").write_bytes(gzip.compress(LINE))
    with pytest.raises(ConfigError, match="expected a positive number"):
        list(lines.read_lines(tmp_path / "a.gz"))

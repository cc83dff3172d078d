"""Small files of graphs, in every form that is read."""

import io
import json
import tarfile

RELATIONS = ["USED-FOR", "CONJUNCTION"]
ROWS = [
    [
        "Beam Search .",
        "parsing ; beam search ; treebank",
        "<task> <method> <material>",
        "1 0 0 ; 0 1 2",
        "we use <method_1> for <task_0> on the <material_2> . <method_1> helps .",
        "1 0 2 3 -1 1 3 -1",
    ],
    ["Trees", "trees", "<otherscientificterm>", "", "we like <otherscientificterm_0> .", "0 -1"],
]
ENTRIES = [
    {
        "title": "Beam Search .",
        "entities": ["parsing", "beam search", "treebank"],
        "types": "<task> <method> <material>",
        "relations": ["beam search -- USED-FOR -- parsing", "parsing -- CONJUNCTION -- treebank"],
        "abstract": ROWS[0][4],
        "abstract_og": "unused",
    },
    {
        "title": "Trees",
        "entities": ["trees"],
        "types": "<otherscientificterm>",
        "relations": [],
        "abstract": ROWS[1][4],
    },
]
WEBNLG = [
    {
        "eid": "Id1",
        "category": "Airport",
        "triples": [["Aarhus", "leaderName", "Jacob_Bundsgaard"]],
        "texts": ["The leader of Aarhus is Jacob Bundsgaard.", "Jacob Bundsgaard leads Aarhus."],
    },
    {
        "eid": "Id2",
        "category": "Airport",
        "triples": [["Aarhus_Airport", "runwayLength", "2702.0"], ["Aarhus_Airport", "cityServed", '"Aarhus"']],
        "texts": ["Aarhus Airport's runway is 2,702 long."],
    },
]


def lines(rows):
    return "".join("\t".join(row) + "\n" for row in rows)


def write_tsv(folder, rows=ROWS, parts=("train", "val", "test")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "relations.vocab").write_text("\n".join(RELATIONS))  # as published: no line feed at the end
    for part in parts:
        (folder / f"preprocessed.{part}.tsv").write_text(lines(rows))
    return folder


def write_json(folder, parts=("train", "val", "test")):
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (folder / f"unprocessed.{part}.json").write_text(json.dumps(ENTRIES, indent=2))
    return folder


def write_archive(folder):
    """Write `unprocessed.tar.gz`, with the extra files that other systems put into archives."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(ENTRIES, indent=2).encode()
    with tarfile.open(folder / "unprocessed.tar.gz", "w:gz") as archive:
        for part in ("train", "val", "test"):
            for name, content in (
                (f"unprocessed/._unprocessed.{part}.json", b"no JSON"),
                (f"unprocessed/unprocessed.{part}.json", data),
            ):
                archive.addfile(_member(name, len(content)), io.BytesIO(content))
    return folder


def write_webnlg(folder, train=WEBNLG, test=WEBNLG):
    folder.mkdir(parents=True, exist_ok=True)
    for part, entries in (("train", train), ("dev", WEBNLG), ("test", test)):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def _member(name, size):
    found = tarfile.TarInfo(name)
    found.size = size
    return found

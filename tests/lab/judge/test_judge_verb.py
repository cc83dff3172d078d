"""`repulsive judge make` and `tally`: output and error messages."""

import json

import pytest

from repulsive.cli import main
from repulsive.lab.judge.key import read_key
from tests.lab.judge.sample import CRITERIA, saved, side_of, two_systems, write_lines


@pytest.fixture
def repulsive(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return run


@pytest.fixture
def key(repulsive, tmp_path):
    first, second = two_systems(tmp_path, 10)
    assert repulsive("judge", "make", first, second)[0] == 0
    return read_key("judge.key.json")


def one_line(outcome):
    code, out, err = outcome
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("repulsive: ")
    return err


def outcomes(key, *by_criterion):
    """Answers from outcomes of the first system: w, l, t or - (none); one letter per item, one word per criterion."""
    words = {"w": "win", "l": "lose", "t": "tie"}
    chosen = {}
    for criterion, letters in zip(CRITERIA, by_criterion, strict=True):
        for item, letter in enumerate(letters, 1):
            if letter in words:
                chosen.setdefault(item, {})[criterion] = side_of(key, item, words[letter])
    return chosen


def test_make_reports_written_files_and_ignored_ids(repulsive, tmp_path):
    first, second = two_systems(tmp_path, 10)
    rows = [json.loads(line) for line in second.read_text().splitlines()]
    write_lines(second, [*rows[1:], {"id": "x", "text": ""}, {"id": "y", "text": ""}])
    code, out, err = repulsive("judge", "make", first, second, "--out", "new/pairs.html", "--count", 4, "--seed", 2)
    assert code == 0
    assert out.splitlines()[0] == "4 of 9 pairs, wavelet versus gearbox"
    assert "new/pairs.html" in out and "new/pairs.key.json" in out
    assert err.splitlines() == [f"ignored 1 id that only {first} has", f"ignored 2 ids that only {second} has"]
    assert len(read_key("new/pairs.key.json").ids) == 4


def test_equal_texts_are_reported(repulsive, tmp_path):
    first, _ = two_systems(tmp_path)
    assert "6 of the 6 pairs have two equal texts" in repulsive("judge", "make", first, first)[2]


def test_the_table_has_the_right_numbers(repulsive, tmp_path, key):
    saved(tmp_path, key, "Ada", outcomes(key, "wwwwwllltt", "wwwwwwwwww", "tttttttttt", "wwwwwwwwl-"))
    saved(tmp_path, key, "Ben", outcomes(key, "wwwwwllltt", "wwwwwwwwww", "tttttttttt", "wwwwwwwww-"))
    files = sorted(tmp_path.glob("*.json"))  # includes the key, like *.json in a shell
    code, out, err = repulsive("judge", "tally", *files, "--key", "judge.key.json", "--markdown")
    assert (code, err) == (0, "")
    assert out.startswith("**wavelet** versus gearbox: 2 judges (Ada, Ben), 10 items\n")
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if "|" in line]
    rows = {name: cells for name, *cells in split}
    assert [cell.split()[0] for cell in rows["Structure"]] == ["50", "30", "20", "+20", "5", "0.727", "1.00", "20"]
    assert rows["Informativeness"][:1] + rows["Informativeness"][4:] == [
        "100 [100, 100]",
        "10 : 0",
        "0.002",
        "n/a",
        "20 of 20",
    ]
    assert rows["Grammar"][2] == "100 [100, 100]" and rows["Grammar"][4:6] == ["0 : 0", "1.000"]
    assert rows["Overall"][0].startswith("94 [") and rows["Overall"][4:6] == ["8 : 0", "0.008"]
    code, out, _ = repulsive("judge", "tally", *files, "--key", "judge.key.json", "--json")
    data = json.loads(out)
    assert (data["judges"], data["items"], data["systems"]) == (["Ada", "Ben"], 10, ["wavelet", "gearbox"])
    structure, overall = data["criteria"]["structure"], data["criteria"]["overall"]
    assert structure["win"]["value"] == 0.5 and structure["agreement"]["kappa"] == pytest.approx(1)
    assert structure["p_value"] == pytest.approx(2 * (1 + 8 + 28 + 56) / 256)
    assert overall["answers"] == 18 and overall["win"]["value"] == pytest.approx(17 / 18)


def test_one_judge_and_a_criterion_nobody_answered(repulsive, tmp_path, key):
    path = saved(tmp_path, key, "Ada", outcomes(key, "wwwwwwwwww", "----------", "tttttttttt", "llllllllll"))
    _, out, _ = repulsive("judge", "tally", path, "--key", "judge.key.json", "--markdown")
    assert "1 judge (Ada), 10 items" in out
    assert "| Informativeness | n/a | n/a | n/a | n/a | n/a | n/a | n/a | 0 |" in out
    shares = "0 [0, 0] | 100 [100, 100] | 0 [0, 0] | −100 [−100, −100]"
    assert f"| Overall | {shares} | 0 : 10 | 0.002 | n/a | 10 of 10 |" in out
    assert "(bootstrap over items)." in out


def test_the_share_of_left_answers_is_reported(repulsive, tmp_path, key):
    always = {item: dict.fromkeys(CRITERIA, "left") for item in range(1, 11)}
    path = saved(tmp_path, key, "Ada", always)
    _, out, _ = repulsive("judge", "tally", path, "--key", "judge.key.json")
    assert "100 % of the answers without ties prefer the left text" in out and "|" not in out
    _, out, _ = repulsive("judge", "tally", path, "--key", "judge.key.json", "--markdown")
    assert "100 % of the answers prefer the text on the left" in out
    assert "| Overall | 50 [" in out  # the sides are balanced, so such a judge favours neither system


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"page": "0" * 16}, "has answers to another page ('0000000000000000')"),
        ({"seal": "0"}, "has answers to another page"),
        ({"format": "notes"}, "not a file of answers"),
        ({"format": "repulsive-judge-key"}, "expected the answers of a judge, got a key"),
        ({"judge": "  "}, "the name of the judge is missing"),
        ({"judge": 4}, "the name of the judge is missing"),
        ({"judge": "\u200b\x07"}, "the name of the judge is missing"),
        ({"answers": {}}, "expected a list of answers, got dict"),
        ({"answers": [3]}, "there is no item None among 10 items"),
        ({"answers": [{"item": 11}]}, "there is no item 11 among 10 items"),
        ({"answers": [{"item": True}]}, "there is no item True among 10 items"),
        ({"answers": [{"item": 1}, {"item": 1}]}, "item 1 is answered twice"),
        ({"answers": [{"item": 1, "grammar": "middle"}]}, "item 1 has the invalid answer 'grammar': 'middle'"),
        ({"answers": [{"item": 1, "grammar": ["left"]}]}, "item 1 has the invalid answer 'grammar': ['left']"),
        ({"answers": [{"item": 1, "humour": "left"}]}, "item 1 has the invalid answer 'humour': 'left'"),
        ({"answers": [{"item": 1}]}, "'Ada' has not answered anything yet"),
    ],
    ids=str,
)
def test_the_error_names_a_file_that_cannot_be_counted(repulsive, tmp_path, key, changes, expected):
    path = saved(tmp_path, key, "Ada", {1: {"grammar": "left"}}, changes)
    line = one_line(repulsive("judge", "tally", path, "--key", "judge.key.json"))
    assert str(path) in line and expected in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is damaged or not JSON"),
        (b'{"format": "repulsive-judge-', "is damaged or not JSON"),
        (b"\xff\xfe", "is damaged or not JSON"),
        (b"[]", "expected a JSON object (answers of a judge, or a key), got list"),
    ],
)
def test_the_error_names_a_damaged_file(repulsive, tmp_path, key, content, expected):
    (tmp_path / "half.json").write_bytes(content)
    for key_file in ("judge.key.json", "half.json"):
        assert f"half.json: {expected}" in one_line(repulsive("judge", "tally", "half.json", "--key", key_file))


def test_control_characters_are_removed_from_names(repulsive, tmp_path, key):
    path = saved(tmp_path, key, "eve", {1: {"grammar": "left"}}, {"judge": "\x1b[31mE\u200bve\u202e\x07"})
    code, out, _ = repulsive("judge", "tally", path, "--key", "judge.key.json", "--markdown")
    assert code == 0 and "[31mEve" in out and not set("\x1b\x07\u200b\u202e") & set(out)


def test_a_judge_given_twice_is_an_error(repulsive, tmp_path, key):
    choices = {1: {"grammar": "left"}}
    paths = [saved(tmp_path, key, name, choices) for name in ("Ada Lovelace", " ada  lovelace")]
    line = one_line(repulsive("judge", "tally", *paths, "--key", "judge.key.json"))
    assert "both are from 'ada lovelace'; pass only one of them" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["judge", "make", "wavelet.jsonl"], "B.jsonl"),
        (["judge", "make", "wavelet.jsonl", "none.jsonl"], "none.jsonl: cannot be read"),
        (["judge", "make", "wavelet.jsonl", "gearbox.jsonl", "--count", "0"], "count"),
        (["judge", "make", "wavelet.jsonl", "gearbox.jsonl", "--out", "."], "is a folder or one of the inputs"),
        (
            ["judge", "make", "wavelet.jsonl", "gearbox.jsonl", "--out", "wavelet.jsonl"],
            "is a folder or one of the inputs",
        ),
        (["judge", "make", "wavelet.jsonl", "gearbox.jsonl", "--out", "wavelet.jsonl/x.html"], "cannot be written"),
        (["judge", "make", "wavelet.jsonl", "gearbox.jsonl", "--seed", "9"], "key of another page"),
        (["judge", "tally", "judge.key.json"], "--key"),
        (["judge", "tally", "judge.key.json", "--key", "judge.key.json"], "no answers to count"),
        (["judge", "tally", "a.json", "--key", "none.json"], "none.json: cannot be read"),
        (["judge", "talley"], "tally"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_with_one_line(repulsive, tmp_path, key, words, expected):
    assert expected in one_line(repulsive(*words))


def test_the_verb_alone_prints_help(repulsive):
    code, out, _ = repulsive("judge")
    assert code == 0 and "make" in out and "tally" in out


def test_a_name_that_ends_in_half_a_character_is_counted(repulsive, tmp_path, key):
    path = tmp_path / saved(tmp_path, key, "Ada", {1: {"grammar": "left"}})
    path.write_text(path.read_text().replace("Ada", "Ada \\ud83d"))  # a name cut off in the middle of a character
    code, out, _ = repulsive("judge", "tally", path, "--key", "judge.key.json", "--markdown")
    out.encode()
    assert code == 0 and "Ada ?" in out

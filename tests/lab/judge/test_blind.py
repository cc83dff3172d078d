"""Blinding: balanced, reproducible, and not visible on the page."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from repulsive.errors import DataError
from repulsive.lab.judge.blind import blind, seal
from repulsive.lab.judge.key import Key, read_key, system_names
from repulsive.lab.judge.make import make
from repulsive.lab.judge.page import render_sheet
from repulsive.lab.judge.texts import Pair
from tests.lab.judge.sample import two_systems

PAIRS = [Pair(f"item-{n}", f"good text {n}", f"poor text {n}", [], None) for n in range(40)]


def test_sides_are_those_of_the_first_system_and_are_balanced():
    for seed in range(20):
        sheet = blind(PAIRS, count=15, seed=seed)
        assert [s.left.startswith("good") for s in sheet.shown] == [side == "left" for side in sheet.sides]
        assert [s.left.split()[-1] for s in sheet.shown] == [name.split("-")[-1] for name in sheet.ids]
        assert sheet.sides.count("left") in (7, 8)
        assert len(set(sheet.ids)) == 15


def test_each_pair_is_drawn_and_on_the_left_half_of_the_time():
    sheets = [blind(PAIRS, count=20, seed=seed) for seed in range(400)]
    drawn = [sum(pair.id in sheet.ids for sheet in sheets) for pair in PAIRS]
    left = [sum((pair.id, "left") in zip(sheet.ids, sheet.sides, strict=True) for sheet in sheets) for pair in PAIRS]
    # Binomial(400, 1/2) has sd 10 and Binomial(400, 1/4) has sd 8.7; the tolerance is five sd, for the largest of 40.
    assert max(abs(one - 200) for one in drawn) < 50
    assert max(abs(one - 100) for one in left) < 44
    odd = [blind(PAIRS, count=1, seed=seed).sides == ["left"] for seed in range(400)]
    assert abs(sum(odd) - 200) < 50  # a single pair can be on either side


def test_the_same_texts_and_seed_give_the_same_sheet_in_any_order():
    assert blind(PAIRS, seed=3) == blind(PAIRS[::-1], seed=3)
    assert blind(PAIRS, seed=3).page != blind(PAIRS, seed=4).page
    assert blind(PAIRS, seed=3).page != blind(PAIRS, seed=3, title="Other").page


def test_the_seed_alone_does_not_reveal_the_sides():
    changed = [dataclasses.replace(PAIRS[0], first="good text, changed"), *PAIRS[1:]]
    one, other = blind(PAIRS), blind(changed)
    assert one.ids != other.ids and one.sides != other.sides


class Words(HTMLParser):
    """Collect the text and the attributes of a page, without style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def test_the_page_contains_neither_systems_nor_ids_nor_salt(tmp_path):
    made = make(*two_systems(tmp_path), tmp_path / "judge.html", seed=1)
    page, key = made.page.read_text(), read_key(made.key)
    hidden = ["wavelet", "gearbox", "item-", key.salt, "sides", str(tmp_path)]
    assert [word for word in hidden if word in page] == []
    assert key.seal in page and key.page in page


def test_swapping_all_sides_changes_only_the_texts_of_the_page():
    sheet = blind(PAIRS[:8])
    other = {"left": "right", "right": "left"}
    sides = [other[side] for side in sheet.sides]
    shown = [dataclasses.replace(s, left=s.right, right=s.left) for s in sheet.shown]
    swapped = dataclasses.replace(sheet, sides=sides, shown=shown)
    ours, theirs = Words(render_sheet(sheet)).found, Words(render_sheet(swapped)).found
    assert {(a.split()[0], b.split()[0]) for a, b in zip(ours, theirs, strict=True) if a != b} == {
        ("good", "poor"),
        ("poor", "good"),
    }


def test_the_key_is_checked_against_its_seal(tmp_path):
    made = make(*two_systems(tmp_path), tmp_path / "judge.html")
    key = read_key(made.key)
    assert key.systems == ("wavelet", "gearbox") and seal(key.salt, key.sides) == key.seal
    text = made.key.read_text()
    made.key.write_text(text.replace('"left"', '"right"', 1))
    with pytest.raises(DataError, match="does not match its seal"):
        read_key(made.key)
    made.key.write_text(text.replace('"systems"', '"system"'))
    with pytest.raises(DataError, match="damaged"):
        read_key(made.key)


def test_the_key_of_another_page_is_never_overwritten(tmp_path):
    first, second = two_systems(tmp_path)
    made = make(first, second, tmp_path / "judge.html")
    before = made.key.read_bytes()
    assert make(first, second, tmp_path / "judge.html") == made
    with pytest.raises(DataError, match="is the key of another page"):
        make(first, second, tmp_path / "judge.html", seed=5)
    assert made.key.read_bytes() == before
    assert make(first, second, tmp_path / "second.html", seed=5).key.name == "second.key.json"


def test_a_title_that_names_a_system_is_rejected(tmp_path):
    first, second = two_systems(tmp_path)
    with pytest.raises(DataError, match="names the system 'gearbox'"):
        make(first, second, tmp_path / "judge.html", title="Old texts and Gearbox's")
    make(first, second, tmp_path / "judge.html", title="Gearboxes")


def test_systems_are_named_after_their_files(tmp_path):
    at = [tmp_path / name for name in ("a/out.jsonl", "b/out.jsonl")]
    assert system_names(at) == ("a/out", "b/out")
    assert system_names([at[0], at[0]]) == ("a/out (1)", "a/out (2)")
    assert Key.of(blind(PAIRS), ("x", "y"), 0).systems == ("x", "y")


def test_a_count_of_zero_is_an_error():
    with pytest.raises(DataError, match="at least one pair to judge, got count=0"):
        blind(PAIRS, count=0)

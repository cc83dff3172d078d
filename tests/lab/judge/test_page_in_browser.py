"""The page for judges in a real browser, offline: keyboard, mouse, reloads, files, small screens."""

import json
import re

import pytest

from repulsive.lab.judge.key import read_key
from repulsive.lab.judge.make import make
from tests.lab.judge.sample import CRITERIA, saved, side_of, two_systems, write_lines
from tests.lab.judge.test_judge_verb import repulsive as repulsive  # the command, in an empty folder
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations

pytestmark = needs_driver

NO_STORAGE = (
    "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('denied', 'SecurityError'); } })"
)
CHECKED = "() => [...document.querySelectorAll('.questions input:checked')].map((x) => `${x.name} ${x.value}`)"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    return make(*two_systems(folder), folder / "judge.html")


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


def press(page, keys):
    for key in keys:
        page.keyboard.press(key)


def answer_dialog(page, yes, act):
    """Perform an action that opens a dialog, and answer it."""
    dialogs = []
    page.once("dialog", lambda dialog: dialogs.append(dialog) or (dialog.accept() if yes else dialog.dismiss()))
    act()
    while not dialogs:
        page.wait_for_timeout(20)


def save(page, folder):
    with page.expect_download() as waiting:
        page.click("#save")
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def test_answers_given_by_keyboard_are_counted_correctly(browser, made, tmp_path, repulsive):
    key = read_key(made.key)
    wanted = {"structure": "wwwwww", "informativeness": "wwwwwl", "grammar": "tttttt", "overall": "wwwltt"}
    words = {"w": "win", "l": "lose", "t": "tie"}
    with driven_page(browser, made.page) as (page, messages):
        page.keyboard.press("Tab")  # instructions
        press(page, ["Tab", "Tab"])  # shortcuts, name
        page.keyboard.type("Til L. Trent")  # letters that are shortcuts elsewhere
        assert page.evaluate(CHECKED) == []
        page.keyboard.press("Tab")
        for item in range(1, 7):
            assert page.inner_text("#where") == f"Pair {item} of 6"
            assert page.locator(".pair:visible").count() == 1
            for criterion in CRITERIA:
                press(page, side_of(key, item, words[wanted[criterion][item - 1]])[0])
            if item < 6:
                assert page.evaluate("document.activeElement.id") == "onward"
                page.keyboard.press("Enter" if item % 2 else "n")
        assert page.inner_text("#count") == "6 of 6 pairs judged"
        assert page.evaluate("document.activeElement.id") == "save"
        assert "All 6 pairs are judged" in page.inner_text("#status")
        with page.expect_download() as waiting:
            page.keyboard.press("Enter")
        name = waiting.value.suggested_filename
        assert re.fullmatch(rf"answers-{key.page[:6]}-til-l-trent\.json", name)
        waiting.value.save_as(tmp_path / name)
        assert [line for line in messages if not line.startswith("blob:")] == []
    code, out, err = repulsive("judge", "tally", name, "--key", made.key, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["judges"] == ["Til L. Trent"]
    found = {
        name: [round(6 * one[kind]["value"]) for kind in ("win", "lose", "tie")]
        for name, one in data["criteria"].items()
    }
    assert found == {"structure": [6, 0, 0], "informativeness": [5, 1, 0], "grammar": [0, 0, 6], "overall": [3, 1, 2]}


def test_answers_given_by_mouse_and_navigation(browser, made):
    with driven_page(browser, made.page) as (page, messages):
        page.click("#pair-1 fieldset[data-criterion=grammar] label:has(input[value=right])")
        assert page.evaluate(CHECKED) == ["1-grammar right"]
        page.click("#pair-1 fieldset[data-criterion=grammar] label:has(input[value=tie])")
        page.click("#next")
        assert page.is_visible("#pair-2") and not page.is_visible("#pair-1")
        page.keyboard.press("p")
        assert page.evaluate(CHECKED) == ["1-grammar tie"] and page.is_disabled("#previous")
        page.keyboard.press("l")  # the first criterion without an answer
        assert page.evaluate(CHECKED) == ["1-structure left", "1-grammar tie"]
        page.keyboard.press("ArrowRight")  # the focus is on the next criterion
        assert "1-informativeness tie" in page.evaluate(CHECKED)
        press(page, "r")
        assert "1-informativeness right" in page.evaluate(CHECKED)
        page.click(".all summary")
        page.click("[data-pair='5']")
        assert page.inner_text("#where") == "Pair 5 of 6"
        assert page.get_attribute("[data-pair='1']", "aria-label") == "Pair 1, started"
        page.click("#open")
        assert page.inner_text("#where") == "Pair 1 of 6"
        assert page.inner_text("#count") == "0 of 6 pairs judged"
        assert messages == []


def test_shortcuts_after_the_last_answer_change_nothing(browser, made):
    with driven_page(browser, made.page) as (page, _):
        press(page, "lltr")
        before = page.evaluate(CHECKED)
        press(page, "rt")
        assert page.evaluate(CHECKED) == before and "is judged" in page.inner_text("#status")
        press(page, "nl")
        assert len(page.evaluate(CHECKED)) == 5
        press(page, "ptt")  # back to a pair that is judged
        assert page.evaluate(CHECKED)[:4] == before


def test_shortcuts_can_be_turned_off_and_leave_those_of_the_browser_alone(browser, made):
    with driven_page(browser, made.page) as (page, _):
        page.focus("#where")
        page.keyboard.press("Control+l")
        page.uncheck("#letters")
        press(page, "ltrn")
        assert page.evaluate(CHECKED) == [] and page.inner_text("#where") == "Pair 1 of 6"
        page.wait_for_function("() => Object.values(localStorage).some((kept) => kept.includes('\"letters\":false'))")
        page.reload()
        page.wait_for_function("() => !document.getElementById('letters').checked")


def test_a_reload_keeps_answers_and_another_page_does_not_get_them(browser, made, tmp_path):
    other = make(*two_systems(tmp_path), tmp_path / "other.html", seed=7)
    with driven_page(browser, made.page) as (page, messages):
        page.fill("#judge", "Ada")
        page.focus("#where")
        press(page, "llrtnr")
        before = page.evaluate(CHECKED)
        assert len(before) == 5
        page.reload()
        assert page.evaluate(CHECKED) == before
        assert page.input_value("#judge") == "Ada" and page.inner_text("#where") == "Pair 2 of 6"
        assert page.inner_text("#count") == "1 of 6 pairs judged" and page.evaluate("done.value") == 1
        page.evaluate("localStorage.setItem(`repulsive-judge-${sheet.dataset.page}`, '{damaged')")
        page.reload()
        assert page.evaluate(CHECKED) == [] and page.is_hidden("#trouble")
        assert messages == []
        page.goto(other.page.as_uri())
        assert page.evaluate(CHECKED) == [] and page.input_value("#judge") == ""


def test_without_storage_the_page_works_and_says_so(browser, made, tmp_path):
    with driven_page(browser, made.page) as (page, messages):
        page.add_init_script(NO_STORAGE)
        page.reload()
        assert "does not store answers" in page.inner_text("#trouble")
        page.fill("#judge", "Ada")
        page.focus("#where")
        press(page, "llrtn")
        assert len(json.loads(save(page, tmp_path).read_text())["answers"]) == 1
        assert [line for line in messages if not line.startswith("blob:")] == []


def test_closing_with_unsaved_answers_and_without_storage_asks_for_confirmation(browser, made):
    with driven_page(browser, made.page) as (page, _):
        page.add_init_script(NO_STORAGE)
        page.reload()
        page.click("#where")
        press(page, "l")
        answer_dialog(page, False, lambda: page.close(run_before_unload=True))
        assert page.evaluate(CHECKED) == ["1-structure left"]


def test_two_windows_of_one_page_show_the_same_answers(browser, made):
    with driven_page(browser, made.page) as (page, messages):
        second = page.context.new_page()
        second.goto(made.page.as_uri())
        page.focus("#where")
        press(page, "lt")
        second.wait_for_function("document.querySelectorAll('.questions input:checked').length === 2")
        assert second.evaluate(CHECKED) == page.evaluate(CHECKED)
        assert messages == []


def test_a_saved_file_can_be_loaded_again(browser, made, tmp_path):
    with driven_page(browser, made.page) as (page, _):
        page.click("#save")
        assert "Enter your name first" in page.inner_text("#status")
        assert page.evaluate("document.activeElement.id") == "judge"
        page.keyboard.type("Ada")
        page.focus("#where")
        press(page, "llrtn")
        press(page, "t")
        path, before = save(page, tmp_path), page.evaluate(CHECKED)
        assert "5 of 6 pairs are not judged yet" in page.inner_text("#status")
    with driven_page(browser, made.page) as (page, messages):  # another browser
        assert page.evaluate(CHECKED) == []
        page.set_input_files("#load", path)
        page.wait_for_function("document.getElementById('status').textContent.startsWith('Loaded')")
        assert page.evaluate(CHECKED) == before and page.input_value("#judge") == "Ada"
        assert page.inner_text("#where") == "Pair 2 of 6"
        page.reload()
        assert page.evaluate(CHECKED) == before
        press(page, "r")
        changed = page.evaluate(CHECKED)
        answer_dialog(page, False, lambda: page.set_input_files("#load", path))
        assert page.evaluate(CHECKED) == changed
        answer_dialog(page, True, lambda: page.set_input_files("#load", path))
        page.wait_for_function("document.getElementById('status').textContent.startsWith('Loaded')")
        assert page.evaluate(CHECKED) == before
        answer_dialog(page, False, lambda: page.click("#fresh"))
        assert page.evaluate(CHECKED) == before
        answer_dialog(page, True, lambda: page.click("#fresh"))
        assert page.evaluate(CHECKED) == [] and page.input_value("#judge") == ""
        assert messages == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"page": "0"}, "has answers to another page"),
        ({"format": "notes"}, "not a file of answers"),
        ({"answers": [{"item": 7, "grammar": "left"}]}, "damaged"),
        ({"answers": [{"item": 1, "grammar": "<b>"}]}, "damaged"),
        (None, "not a file of answers"),
    ],
    ids=str,
)
def test_an_invalid_file_changes_nothing(browser, made, tmp_path, changes, expected):
    path = saved(tmp_path, read_key(made.key), "Eve", {1: {"grammar": "left"}}, changes)
    if changes is None:
        path.write_text("{")
    with driven_page(browser, made.page) as (page, messages):
        page.set_input_files("#load", path)
        page.wait_for_function("document.getElementById('status').textContent")
        assert expected in page.inner_text("#status")
        assert page.evaluate(CHECKED) == [] and page.input_value("#judge") == ""
        assert messages == []


def test_markup_in_texts_is_shown_but_never_run(browser, tmp_path):
    evil = "</p></script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\u202etxet"
    row = {"id": 1, "text": evil, "input": {evil: evil}, "gold": evil}
    files = [write_lines(tmp_path / f"{name}.jsonl", [row]) for name in ("one", "two")]
    made = make(*files, tmp_path / "judge.html", title=evil)
    with driven_page(browser, made.page) as (page, messages):
        shown = evil.replace("\u202e", "⟨U+202E⟩")
        assert page.locator("article .text").all_inner_texts() == [shown, shown]
        assert page.inner_text("h1") == shown and page.inner_text(".source dt") == shown
        assert page.evaluate("window.ran === undefined") and page.locator("img").count() == 0
        assert messages == []


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Many pairs of very long, right-to-left and empty texts."""
    folder = tmp_path_factory.mktemp("long")
    texts = ["word " * 400, "endless" * 60, "", "שלום " * 40, "a\n\nb"]
    for name in ("one", "two"):
        rows = [{"id": n, "text": texts[n % 5], "input": "endless" * 40, "gold": "x"} for n in range(30)]
        write_lines(folder / f"{name}.jsonl", rows)
    return make(folder / "one.jsonl", folder / "two.jsonl", folder / "judge.html", title="Endless" * 30)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen_and_buttons_are_large_enough(browser, long, dark, width):
    with driven_page(browser, long.page, dark=dark, width=width) as (page, messages):
        page.click(".all summary")
        for _ in range(6):
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1], "the page is wider than the screen"
            small = page.evaluate(
                """() => [...document.querySelectorAll(".choices span, button, .load")].filter(
                     (x) => x.checkVisibility() && x.getBoundingClientRect().height < 32).map((x) => x.textContent)"""
            )
            assert small == [], "too small for a finger"
            page.keyboard.press("n")
        left, right = (box.bounding_box()["x"] for box in page.locator("article:visible").all())
        assert (left == right) == (width == 360)  # one above the other, with a hint
        assert page.locator(".stacked:visible").count() == (2 if width == 360 else 0)
        red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
        assert red < 40 if dark else red > 230
        assert messages == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_wrong(browser, made, dark, width):
    assert violations(browser, made.page, dark=dark, width=width) == []


def test_groups_choices_and_progress_have_accessible_names(browser, made):
    with driven_page(browser, made.page) as (page, _):
        for criterion in CRITERIA:
            group = page.get_by_role("group", name=criterion.capitalize())
            assert group.get_by_role("radio").count() == 3
            assert group.get_by_role("radio", name="Tie").count() == 1
        assert page.get_by_role("progressbar", name="0 of 6 pairs judged").count() == 1
        assert page.get_by_role("textbox", name="Your name").count() == 1
        reached = set()
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
        wanted = {"judge", "letters", "open", "next", "onward", "save", "load", "fresh"}
        assert wanted | {f"1-{criterion}" for criterion in CRITERIA} <= reached


def test_the_focus_ring_does_not_suggest_an_answer(browser, made):
    with driven_page(browser, made.page) as (page, _):
        place = "`#pair-1 [data-criterion=${name}] ${part}`"
        style = f"([name, part]) => getComputedStyle(document.querySelector({place})).outlineStyle"
        page.focus("#where")
        press(page, "l")
        assert page.evaluate(style, ["informativeness", ".choices"]) == "solid"
        assert page.evaluate(style, ["informativeness", "label span"]) == "none"
        page.keyboard.press("Shift+Tab")
        assert page.evaluate(style, ["structure", "label span"]) == "solid"
        assert page.evaluate(style, ["structure", ".choices"]) == "none"


def test_questions_do_not_cover_the_texts_while_the_instructions_are_open(browser, made):
    bottom = "document.querySelector('.texts').getBoundingClientRect().bottom"
    top = "document.querySelector('.questions').getBoundingClientRect().top"
    with driven_page(browser, made.page) as (page, _):
        assert page.evaluate("document.getElementById('about').open") and page.evaluate(f"{bottom} <= {top}")


def test_questions_stay_visible_below_long_texts_on_a_large_screen(browser, long):
    with driven_page(browser, long.page) as (page, _):
        number = next(n for n in range(1, 31) if "word word" in page.text_content(f"#pair-{n}"))
        page.evaluate(f"document.querySelector('[data-pair=\"{number}\"]').click()")
        box = page.locator(f"#pair-{number} .questions").bounding_box()
        assert box["y"] + box["height"] <= 901

"""Page for judges: one self-contained HTML document with all pairs."""

from __future__ import annotations

from importlib.resources import files

from repulsive.lab.judge.blind import Sheet, Shown
from repulsive.lab.judge.criteria import CHOICES, CRITERIA
from repulsive.lab.judge.texts import Source
from repulsive.pages.html.document import document
from repulsive.pages.text import escaped

_ABOUT = (
    "Each pair shows two texts for the same task, written by two systems. Which system is on the left changes at "
    "random from pair to pair. For each pair, choose the better text by four criteria; choose a tie if you see no "
    "difference. Judge each pair on its own, and do not talk to other judges before everyone has finished."
)
_KEYS = (
    ("L, T, R", "left, tie, right: answer the highlighted criterion and move to the next one"),
    ("N, P", "next, previous pair"),
    ("Tab, arrow keys, space", "work as usual"),
)


def render_sheet(sheet: Sheet) -> str:
    """Render the page for judges; it contains no names, ids or sides of the systems."""
    total = len(sheet.shown)
    pairs = "".join(_pair(one, number, total) for number, one in enumerate(sheet.shown, 1))
    data = f'id="sheet" data-page="{sheet.page}" data-seal="{sheet.seal}"'
    body = f"{_header(sheet.title, total)}<main {data}>\n{_steps(total)}{pairs}{_after(total)}"
    return document(sheet.title, body, script=_asset("judge.js"), style=_asset("judge.css"))


def _header(title: str, total: int) -> str:
    keys = "".join(f"<div><dt>{keys}</dt><dd>{what}</dd></div>" for keys, what in _KEYS)
    return (
        f'<header>\n<h1 dir="auto">{escaped(title)}</h1>\n'
        '<noscript><p class="warn">This page needs JavaScript. It runs only on your computer and sends nothing.</p>'
        "</noscript>\n"
        f'<details id="about" open><summary>Instructions</summary><p>{_ABOUT}</p>\n'
        f'<dl class="keys">{keys}</dl>\n'
        '<p><label class="switch"><input type="checkbox" id="letters" checked> Use keyboard shortcuts</label></p>\n'
        "<p>Your answers stay in this browser until you save them as a file. The page sends nothing.</p></details>\n"
        '<div class="who"><label for="judge">Your name</label>'
        '<input id="judge" autocomplete="name" maxlength="80" spellcheck="false">'
        f'<label for="done" class="count"><span id="count">0 of {total} pairs judged</span></label>'
        f'<progress id="done" max="{total}" value="0"></progress></div>\n'
        '<p id="trouble" class="warn" hidden></p>\n</header>\n'
    )


def _steps(total: int) -> str:
    buttons = (
        '<button type="button" id="previous">← Previous</button>'
        '<button type="button" id="open">First unfinished pair</button>'
        '<button type="button" id="next">Next →</button>'
    )
    heading = f'<h2 id="where" tabindex="-1">Pair 1 of {total}</h2>'
    return f'<nav class="steps" aria-label="Navigation">{heading}{buttons}</nav>\n'


def _pair(one: Shown, number: int, total: int) -> str:
    hidden = "" if number == 1 else " hidden"
    gold = ""
    if one.gold is not None:
        gold = (
            f'<details class="gold"><summary>Reference text, written by a person</summary>{_text(one.gold)}</details>\n'
        )
    questions = "".join(_question(name, number) for name in CRITERIA)
    return (
        f'<section class="pair" id="pair-{number}" aria-label="Pair {number} of {total}"{hidden}>\n'
        f"{_input(one.source)}{gold}"
        f'<div class="texts">{_side("Left", "above", one.left)}{_side("Right", "below", one.right)}</div>\n'
        f'<form class="questions" aria-label="Your judgement">{questions}</form>\n'
        "</section>\n"
    )


def _input(source: Source) -> str:
    if not source:
        return ""
    parts = ""
    for label, lines in source:
        named = f'<dt dir="auto">{escaped(label)}</dt>' if label else '<dt class="unseen">Input</dt>'
        parts += f"<div>{named}<dd>{''.join(_text(line) for line in lines)}</dd></div>"
    return f'<details class="source" open><summary>Input of both systems</summary><dl>{parts}</dl></details>\n'


def _side(name: str, stacked: str, text: str) -> str:
    where = f'<span class="stacked"> ({stacked})</span>'
    return f"<article><h3>{name}{where}</h3>{_text(text)}</article>"


def _text(text: str) -> str:
    if not text.strip():
        return '<p class="none">(no text)</p>'
    return f'<p class="text" dir="auto">{escaped(text)}</p>'


def _question(name: str, number: int) -> str:
    group = f"{number}-{name}"
    options = "".join(
        f'<label><input type="radio" name="{group}" value="{choice}"><span>{choice.capitalize()}</span></label>'
        for choice in CHOICES
    )
    return (
        f'<fieldset data-criterion="{name}" aria-describedby="{group}"><legend>{name.capitalize()}</legend>'
        f'<p id="{group}">{CRITERIA[name]}</p><div class="choices">{options}</div></fieldset>'
    )


def _after(total: int) -> str:
    jumps = "".join(f'<li><button type="button" data-pair="{n}">{n}</button></li>' for n in range(1, total + 1))
    return (
        '<div class="onward"><p id="status" role="status"></p>'
        '<button type="button" id="onward">Next pair →</button></div>\n'
        '<section class="keep" aria-labelledby="keep"><h2 id="keep">Save</h2>\n'
        "<p>When you have judged all pairs, save your answers as a file and send it to the organiser.</p>\n"
        '<div class="row"><button type="button" id="save" class="main">Save as file</button>'
        '<label class="load" for="load">Continue from a saved file</label>'
        '<input type="file" id="load" accept=".json,application/json">'
        '<button type="button" id="fresh">Start over</button></div></section>\n'
        f'<details class="all"><summary>All pairs</summary><ol>{jumps}</ol></details>\n'
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

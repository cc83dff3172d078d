"""Blind human evaluation of the texts of two systems: a page for the judges, and the table of their answers.

This is the paper's Table 5: five judges compare 50 pairs of texts by structure, informativeness, grammar and overall
quality. For each criterion the text of the first system wins, loses or ties.

    make.py       texts.py -> blind.py -> page.py and key.py: read texts, draw pairs, write the page and the key
    tally.py      answers.py -> votes.py and agreement.py: read the judges' files, compute the table
    criteria.py   the questions and the possible answers
"""

from repulsive.lab.judge.agreement import Agreement, fleiss_kappa
from repulsive.lab.judge.answers import Answers, read_answers
from repulsive.lab.judge.blind import Sheet, blind
from repulsive.lab.judge.key import Key, read_key
from repulsive.lab.judge.page import render_sheet
from repulsive.lab.judge.texts import Pair, Pairing, pair_texts, read_texts
from repulsive.lab.judge.votes import Share, Verdict, verdict

__all__ = [
    "Agreement",
    "Answers",
    "Key",
    "Pair",
    "Pairing",
    "Share",
    "Sheet",
    "Verdict",
    "blind",
    "fleiss_kappa",
    "pair_texts",
    "read_answers",
    "read_key",
    "read_texts",
    "render_sheet",
    "verdict",
]

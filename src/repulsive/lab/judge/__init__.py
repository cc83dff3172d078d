"""Blind human judgement of two systems' texts: a page for the judges, and the table their answers make.

The paper's Table 5: 50 test items, five judges, and for structure, informativeness, grammar and overall whether the
text of one system is better than that of the other, worse, or as good.
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

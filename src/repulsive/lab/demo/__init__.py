"""Two demos: repulsion in a small language model, and the paper's Table 1 on generated reviews.

settings.py   sizes and settings, fixed in advance
text.py       the text: Python's own documentation
train.py      one training run, with `repel` in one line
runs.py       all runs in worker processes, and their files
terminal.py   live table, or one line per run
findings.py   paired differences, intervals, and what they say
example.py    the sentence nearest the median effect
page.py       the page
run.py        all of it: `repulsive demo`
trained.py    the trained models, for `repulsive inspect`
table.py      the other demo: `repulsive demo --table`
"""

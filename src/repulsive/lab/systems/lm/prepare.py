"""Prepare plain text for language models, as bytes or as word pieces of a given vocabulary.

    prepare("lm", "data/corpus.txt.xz", "prepared/lm")

A folder with files train, dev and test is used as it is. Any other text is split at blank lines into documents,
which are assigned to the three data splits at random.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from repulsive.errors import DataError
from repulsive.lab.systems.lm import toy as recall
from repulsive.lab.systems.lm.data import TASK, TOKENIZERS, VOCABULARY, Text, storage_type
from repulsive.lab.systems.lm.datasets import DEV
from repulsive.lab.systems.lm.files import Passage, find_part_files, read_parts, split_documents
from repulsive.lab.text.dataset import Plan
from repulsive.lab.text.documents import find_corpus
from repulsive.lab.text.folders import filling
from repulsive.lab.text.inputs import checksums
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.wordpiece import SEP, UNKNOWN, WordPieces

TOY_LINES = {"train": 4_000, "dev": 200, "test": 200}
_CHUNK = 1_000_000  # characters tokenised together
_MOST = 1 << 16  # ids that fit into 16 bits


@dataclass(frozen=True)
class _Source:
    """A text that is read passage by passage and tokenised.

    Args:
        read: function that reads the text.
        pieces: the WordPiece vocabulary; None: tokens are bytes.
        name: name of the text, for error messages.
    """

    read: Callable[[], Iterator[Passage]]
    pieces: WordPieces | None
    name: str

    def write(self, plan: Plan[Text], jobs: int | None, progress: Progress) -> Text:
        """Write the folder that a plan describes."""
        manifest: dict[str, Any] = {"task": TASK} | plan.manifest()
        manifest["versions"] = {} if self.pieces is None else {"tokenizers": version("tokenizers")}
        tokens: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        sizes = Counter[str]()
        with filling(plan.out, manifest) as aside:
            for part, text in self._chunks():
                tokens[part].append(tokenize(text, self.pieces))
                sizes[part] += len(text.encode())
                progress("bytes", sizes.total(), 0)
            for part in PARTS:
                if sum(map(len, tokens[part])) < 2:
                    raise DataError(f"{self.name}: {_too_little(part) if sizes else 'no text'}")
            packed = {part: np.concatenate(tokens[part]) for part in PARTS}
            for part in PARTS:
                np.save(aside / f"{part}.npy", packed[part], allow_pickle=False)
            if self.pieces is not None:
                (aside / VOCABULARY).write_bytes(self.pieces.as_bytes())
                unknown = self.pieces.index[UNKNOWN]
                manifest["unknown"] = {part: float((packed[part] == unknown).mean()) for part in PARTS}
            manifest["tokens"] = {part: len(packed[part]) for part in PARTS}
            manifest["bytes"] = {part: sizes[part] for part in PARTS}
        return Text.load(plan.out)

    def _chunks(self) -> Iterator[Passage]:
        """Join the passages of each data split into longer ones."""
        waiting: dict[str, list[str]] = {part: [] for part in PARTS}
        sizes = Counter[str]()
        for part, passage in self.read():
            waiting[part].append(passage)
            sizes[part] += len(passage)
            if sizes[part] >= _CHUNK:
                yield part, "".join(waiting[part])
                waiting[part], sizes[part] = [], 0
        yield from ((part, "".join(passages)) for part, passages in waiting.items() if passages)


def tokenize(text: str, pieces: WordPieces | None) -> np.ndarray:
    """Tokenise a text that ends with a line feed.

    Args:
        text: the text.
        pieces: the WordPiece vocabulary, with [SEP] for every line feed; None: tokens are bytes.

    Returns:
        uint8 or uint16 [N].
    """
    if pieces is None:
        return np.frombuffer(text.encode(), dtype=np.uint8)
    end = pieces.index[SEP]
    lines = [[*line, end] for line in pieces.encode(text.split("\n")[:-1])]
    return np.array([piece for line in lines for piece in line], dtype=storage_type(len(pieces.pieces)))


def plan_text(
    data: str | Path,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    vocabulary: str | Path | None = None,
    lowercase: bool | None = None,
    suffix: str | None = None,
    dev: float | None = None,
    seed: int = 0,
    limit: int = 20,
) -> Plan[Text]:
    """Plan the preparation of a text.

    Args:
        data: a text file, plain, xz or gzip, or a folder: of train.SUFFIX, dev.SUFFIX and test.SUFFIX, or of texts.
        out: the folder to make.
        tokenizer: "bytes", the default, or "wordpiece".
        vocabulary: BERT's `vocab.txt`, for word pieces.
        lowercase: lower-case word pieces, as BERT uncased; None: yes.
        suffix: extension of the files for train, dev and test; None: "txt".
        dev: share of the documents that go to dev if there are no files for the splits; test gets as many.
        seed: random seed.
        limit: number of bad lines that may be skipped in a file.

    Raises:
        DataError: an option is invalid, or a file is missing or not a vocabulary.
    """
    data, tokenizer = Path(data), tokenizer or TOKENIZERS[0]
    pieces = _pieces(tokenizer, vocabulary, lowercase)
    files = find_part_files(data, suffix)
    if files and dev is not None:
        raise DataError(f"{data}: has a dev file of its own ({files['dev'].name}); leave out --dev")
    share = DEV if dev is None else dev
    if not 0 < share < 0.5:
        raise DataError(f"dev={share:g}: expected the share of the documents for dev, and for test, between 0 and 0.5")
    settings: dict[str, Any] = {"tokenizer": tokenizer, "lowercase": bool(pieces and pieces.lowercase), "limit": limit}
    if files:
        paths, read = list(files.values()), partial(read_parts, files, limit)
    else:
        paths = find_corpus(data, apart_from=None if vocabulary is None else Path(vocabulary))
        read = partial(split_documents, paths, share, seed, limit)
        settings |= {"dev": share, "seed": seed}
    sums = checksums(paths, data if data.is_dir() else data.parent)
    if vocabulary is not None:
        sums |= checksums([Path(vocabulary)], Path(vocabulary).parent)
    source = _Source(read, pieces, ", ".join(str(path) for path in paths[:3]))
    return Plan(TASK, Path(out), settings, sums, source.write, Text.load, summarize)


def plan_toy(data: None, out: str | Path, *, seed: int = 0, limit: int = 20) -> Plan[Text]:
    """Plan the generation of a toy text, as bytes; see `toy`.

    Args:
        data: not used: the text is generated.
        out: the folder to make.
        seed: random seed.
        limit: not used: there are no bad lines.
    """
    texts = {part: "".join(recall.lines(count, f"{seed}/{part}")) for part, count in TOY_LINES.items()}
    sums = {f"generated {part}": hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
    settings = {"tokenizer": "bytes", "lowercase": False, "seed": seed}
    source = _Source(lambda: iter(texts.items()), None, "the generated text")
    return Plan(TASK, Path(out), settings, sums, source.write, Text.load, summarize)


def summarize(text: Text) -> str:
    """Describe the prepared data, one line per data split."""
    manifest, lines = text.manifest, []
    for part, tokens in text.parts.items():
        line = f"{part:5}  {text.bytes[part]:>13,} bytes  {len(tokens):>13,} tokens"
        lines.append(line + (f"  ({manifest['unknown'][part]:.2%} unknown)" if text.pieces is not None else ""))
    return "\n".join([*lines, f"{manifest['settings']['tokenizer']}, vocabulary of {text.vocabulary:,}"])


def _pieces(tokenizer: str, vocabulary: str | Path | None, lowercase: bool | None) -> WordPieces | None:
    if tokenizer not in TOKENIZERS:
        raise DataError(f"tokenizer={tokenizer!r}: choose one of {', '.join(TOKENIZERS)}")
    if tokenizer == "bytes":
        if vocabulary is not None or lowercase:
            which = "--lowercase" if vocabulary is None else "--vocabulary"
            raise DataError(f"{which} is for word pieces, but the tokenizer is bytes; give --tokenizer wordpiece")
        return None
    if vocabulary is None:
        raise DataError("tokenizer='wordpiece' needs a vocabulary: give --vocabulary vocab.txt")
    pieces = WordPieces.read(Path(vocabulary), lowercase is not False)
    if len(pieces.pieces) > _MOST:
        raise DataError(f"{vocabulary}: has {len(pieces.pieces):,} pieces; at most {_MOST:,} can be stored")
    return pieces


def _too_little(part: str) -> str:
    more = "" if part == "train" else ", raise --dev, or give a file for each part"
    return f"too little text for {part}; give more documents, separated by blank lines{more}"

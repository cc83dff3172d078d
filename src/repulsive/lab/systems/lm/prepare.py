"""Plain text to packed tokens for language models: bytes, or word pieces of a given vocabulary.

    plan_text("data/corpus.txt.xz", "prepared/lm").make()

A folder with files train, dev and test is taken as it is. Of any other text, documents (blank lines stand between them)
are dealt out to the three parts at random.
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
from repulsive.lab.systems.lm.data import TASK, TOKENIZERS, VOCABULARY, Text, kind_of
from repulsive.lab.systems.lm.files import Passage, deal_documents, find_part_files, read_parts
from repulsive.lab.text.documents import find_corpus
from repulsive.lab.text.folders import filling
from repulsive.lab.text.plan import is_made
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.raw import sums_of
from repulsive.lab.text.tokenizing import Progress
from repulsive.lab.text.wordpiece import SEP, UNKNOWN, WordPieces

DEV = 0.005
TOY = "lm-toy"
TOY_LINES = {"train": 4_000, "dev": 200, "test": 200}
_CHUNK = 1_000_000  # characters tokenised together
_MOST = 1 << 16  # pieces that 16 bits can number


@dataclass(frozen=True)
class TextPlan:
    """A preparation that can begin: files are found and summed, none is read.

    Args:
        out: the folder to make.
        read: reads the text, passage by passage.
        pieces: the WordPiece vocabulary; None: tokens are bytes.
        asked: settings as the manifest has them.
        sums: SHA-256 of all files.
        name: of the text, for messages.
    """

    out: Path
    read: Callable[[], Iterator[Passage]]
    pieces: WordPieces | None
    asked: dict[str, Any]
    sums: dict[str, str]
    name: str

    def already(self) -> Text | None:
        """What is in the folder, if it was made from the same files in the same way; None if there is nothing.

        Raises:
            DataError: it was made otherwise, is damaged, or is something else.
        """
        return Text.load(self.out) if is_made(self.out, TASK, self.asked, self.sums) else None

    def make(self, progress: Progress | None = None) -> Text:
        """Read, tokenise and write; what is prepared in the folder is replaced.

        Args:
            progress: told how many bytes are done.

        Raises:
            DataError: a file is damaged, a part is empty, or the folder cannot be written.
        """
        manifest: dict[str, Any] = {"task": TASK, "settings": self.asked, "sources": self.sums}
        manifest["versions"] = {} if self.pieces is None else {"tokenizers": version("tokenizers")}
        tokens: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        sizes = Counter[str]()
        with filling(self.out, manifest) as aside:
            for part, text in self._chunks():
                tokens[part].append(tokenize(text, self.pieces))
                sizes[part] += len(text.encode())
                if progress is not None:
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
        return Text.load(self.out)

    def _chunks(self) -> Iterator[Passage]:
        """Passages of a part, joined into longer ones."""
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
    """Tokens of a text that ends with a line feed: its bytes, or pieces with [SEP] for every line feed.

    Args:
        text: the text.
        pieces: the WordPiece vocabulary; None: bytes.

    Returns:
        uint8 or uint16 [N].
    """
    if pieces is None:
        return np.frombuffer(text.encode(), dtype=np.uint8)
    end = pieces.index[SEP]
    found = [[*line, end] for line in pieces.encode(text.split("\n")[:-1])]
    return np.array([piece for line in found for piece in line], dtype=kind_of(len(pieces.pieces)))


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
) -> TextPlan:
    """Find the files of a text and check what is asked for.

    Args:
        data: a text file, plain, xz or gzip, or a folder: of train.SUFFIX, dev.SUFFIX and test.SUFFIX, or of texts.
        out: the folder to make.
        tokenizer: "bytes", the default, or "wordpiece".
        vocabulary: BERT's `vocab.txt`, for word pieces.
        lowercase: of word pieces, as BERT uncased; None: yes.
        suffix: how the names of files for train, dev and test end; None: "txt".
        dev: share of the documents that dev gets, and test as many again, where there are no files for them.
        seed: of what is drawn.
        limit: bad lines that may be skipped in a file.

    Raises:
        DataError: a value that cannot be, or a file that is missing or not a vocabulary.
    """
    data, tokenizer = Path(data), tokenizer or TOKENIZERS[0]
    pieces = _pieces(tokenizer, vocabulary, lowercase)
    files = find_part_files(data, suffix)
    if files and dev is not None:
        raise DataError(f"{data}: has a dev file of its own ({files['dev'].name}); leave out --dev")
    share = DEV if dev is None else dev
    if not 0 < share < 0.5:
        raise DataError(f"dev={share:g}: it is the share of the documents that dev takes, and test; between 0 and 0.5")
    asked: dict[str, Any] = {"tokenizer": tokenizer, "lowercase": bool(pieces and pieces.lowercase), "limit": limit}
    if files:
        paths, read = list(files.values()), partial(read_parts, files, limit)
    else:
        paths = find_corpus(data, apart_from=None if vocabulary is None else Path(vocabulary))
        read = partial(deal_documents, paths, share, seed, limit)
        asked |= {"dev": share, "seed": seed}
    sums = sums_of(paths, data if data.is_dir() else data.parent)
    if vocabulary is not None:
        sums |= sums_of([Path(vocabulary)], Path(vocabulary).parent)
    return TextPlan(Path(out), read, pieces, asked, sums, ", ".join(str(path) for path in paths[:3]))


def plan_toy(out: str | Path, *, seed: int = 0) -> TextPlan:
    """A generated text, as bytes: see `toy.recall`.

    Args:
        out: the folder to make.
        seed: of what is drawn.
    """
    texts = {part: "".join(recall.lines(count, f"{seed}/{part}")) for part, count in TOY_LINES.items()}
    sums = {f"generated {part}": hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
    asked = {"tokenizer": "bytes", "lowercase": False, "seed": seed}
    return TextPlan(Path(out), lambda: iter(texts.items()), None, asked, sums, "the generated text")


def summary(text: Text) -> str:
    """What was made, in a few lines."""
    told, lines = text.manifest, []
    for part, tokens in text.parts.items():
        line = f"{part:5}  {text.bytes[part]:>13,} bytes  {len(tokens):>13,} tokens"
        lines.append(line + (f"  ({told['unknown'][part]:.2%} unknown)" if text.pieces is not None else ""))
    return "\n".join([*lines, f"{told['settings']['tokenizer']}, vocabulary of {text.vocabulary:,}"])


def _pieces(tokenizer: str, vocabulary: str | Path | None, lowercase: bool | None) -> WordPieces | None:
    if tokenizer not in TOKENIZERS:
        raise DataError(f"tokenizer={tokenizer!r}: choose one of {', '.join(TOKENIZERS)}")
    if tokenizer == "bytes":
        if vocabulary is not None or lowercase:
            which = "--lowercase" if vocabulary is None else "--vocabulary"
            raise DataError(f"{which} is for word pieces, and bytes keep the text as it is; give --tokenizer wordpiece")
        return None
    if vocabulary is None:
        raise DataError("tokenizer='wordpiece' needs a vocabulary: give --vocabulary vocab.txt")
    pieces = WordPieces.read(Path(vocabulary), lowercase is not False)
    if len(pieces.pieces) > _MOST:
        raise DataError(f"{vocabulary}: has {len(pieces.pieces):,} pieces; at most {_MOST:,} can be stored")
    return pieces


def _too_little(part: str) -> str:
    more = "" if part == "train" else ", raise --dev, or give a file for each part"
    return f"too little text for {part}; give more documents (blank lines stand between them){more}"

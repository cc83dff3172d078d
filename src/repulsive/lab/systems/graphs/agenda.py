"""Read AGENDA, abstracts with their knowledge graphs (Koncel-Kedziorski et al., 2019), in both published forms."""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.data import Graph, Graphs, Relation, Token, filled, find_problem
from repulsive.lab.text.lines import BadLines, open_bytes, read_lines, replace_surrogates

_MENTION = re.compile(r"<([a-z]+)_([0-9]{1,9})>")
_TEXTS = ("title", "types", "abstract")
_LISTS = ("entities", "relations")
_PIECE = 1 << 16  # bytes read at a time
_MOST = 1 << 22  # maximum characters of an entry in the JSON form


def read_relations(path: str | Path) -> list[str]:
    """Read the names of the relations from `relations.vocab`, one per line.

    Raises:
        DataError: the file is empty, or has a name twice.
    """
    names = [line.strip() for _, line in read_lines(path) if line.strip()]
    if not names or len(set(names)) != len(names):
        problem = "has a relation twice" if names else "empty file"
        raise DataError(f"{path}: {problem}; expected the name of one relation per line")
    return names


def read_tsv_graphs(path: str | Path, relations: Sequence[str], *, lowercase: bool = True, limit: int = 20) -> Graphs:
    """Read the processed form: title, entities, types, relations, abstract and sentence plan, separated by tabs.

    Args:
        path: plain, gzip or xz.
        relations: names of the relations; the file has indices into them.
        lowercase: lower-case the titles; everything else is published in lower case.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: the file is missing, damaged or empty, or has more bad lines than `limit`.
    """
    graphs = []
    with BadLines(path, limit) as bad:
        for number, line in read_lines(path, bad):
            if not line.strip():
                continue
            try:
                graphs.append(_checked(_from_fields(line.split("\t"), relations, lowercase)))
            except _Invalid as error:
                bad.skip(number, str(error))
        return _collect(graphs, bad)


def read_json_graphs(
    path: str | Path,
    relations: Sequence[str] | None = None,
    *,
    member: str | None = None,
    lowercase: bool = True,
    limit: int = 20,
) -> Graphs:
    """Read the unprocessed form: a list of JSON objects, read one by one.

    Relations refer to entities by their words here. If two entities have the same words, the first one is used; only
    the processed form distinguishes them.

    Args:
        path: plain, gzip or xz; or a tar archive.
        relations: names that are allowed; None: any.
        member: name of the file in a tar archive, without folders; nothing is unpacked to disk.
        lowercase: lower-case the titles.
        limit: number of bad entries that may be skipped.

    Raises:
        DataError: the file is missing, damaged, empty or not a list in JSON, or has more bad entries than `limit`.
    """
    graphs = []
    with BadLines(path, limit) as bad, _opened(Path(path), member) as file:
        for number, entry in _entries(file, path):
            try:
                graphs.append(_checked(_from_entry(entry, relations, lowercase)))
            except _Invalid as error:
                bad.skip(number, str(error))
        return _collect(graphs, bad)


class _Invalid(Exception):
    """A line or an entry is invalid; the message says why."""


def _collect(graphs: list[Graph], bad: BadLines) -> Graphs:
    if not graphs:
        raise DataError(f"{bad.path}: no usable graph" + (f"; {bad.first[0]}" if bad.first else ""))
    return Graphs(graphs, bad.count)


def _checked(graph: Graph) -> Graph:
    if problem := find_problem(graph):
        raise _Invalid(problem)
    return graph


def _from_fields(fields: list[str], names: Sequence[str], lowercase: bool) -> Graph:
    if len(fields) != 6:
        raise _Invalid(f"{len(fields)} columns, expected 6: title, entities, types, relations, abstract, plan")
    title, entities, types, listed, abstract, plan = fields
    relations: list[Relation] = []
    for triple in filter(None, map(str.strip, listed.split(" ; "))):
        numbers = _integers(triple, "relation")
        if len(numbers) != 3:
            raise _Invalid(f"relation {triple!r}: expected three numbers: head, relation and tail")
        head, name, tail = numbers
        if not 0 <= name < len(names):
            raise _Invalid(f"relation {name} is unknown: there are {len(names)}, numbered from 0")
        relations.append((head, names[name], tail))
    named = [words.split() for words in entities.split(" ; ")] if entities.strip() else []
    sentences: list[list[int]] = [[]]
    for node in _integers(plan, "sentence plan"):
        if node == -1:
            sentences.append([])
        else:
            sentences[-1].append(node)
    if sentences.pop():
        raise _Invalid("the sentence plan does not end with -1")
    return _graph(title, named, types, relations, abstract, sentences, lowercase)


def _from_entry(entry: Any, names: Sequence[str] | None, lowercase: bool) -> Graph:
    if not isinstance(entry, dict):
        raise _Invalid("not a JSON object")
    for key in _TEXTS:
        if not isinstance(entry.get(key), str):
            raise _Invalid(f"{key!r} is missing or not a string")
    for key in _LISTS:
        if not isinstance(entry.get(key), list) or not all(isinstance(item, str) for item in entry[key]):
            raise _Invalid(f"{key!r} is missing or not a list of strings")
    numbers: dict[str, int] = {}
    for i, words in enumerate(entry["entities"]):
        numbers.setdefault(words, i)
    relations = [_named_relation(text, numbers, names) for text in entry["relations"]]
    entities = [words.split() for words in entry["entities"]]
    return _graph(entry["title"], entities, entry["types"], relations, entry["abstract"], [], lowercase)


def _named_relation(text: str, numbers: dict[str, int], names: Sequence[str] | None) -> Relation:
    """Parse `head -- NAME -- tail`, where an entity may contain ` -- ` itself."""
    parts = text.split(" -- ")
    for i in range(1, len(parts) - 1):
        head, tail = " -- ".join(parts[:i]), " -- ".join(parts[i + 1 :])
        if head in numbers and tail in numbers:
            if names is not None and parts[i] not in names:
                raise _Invalid(f"relation {parts[i]!r} is unknown; relations: {', '.join(names)}")
            return numbers[head], parts[i], numbers[tail]
    raise _Invalid(f"relation {text!r}: expected 'entity -- NAME -- entity'")


def _graph(
    title: str,
    entities: list[list[str]],
    types: str,
    relations: list[Relation],
    abstract: str,
    plan: list[list[int]],
    lowercase: bool,
) -> Graph:
    kinds = types.split()
    target: list[Token] = []
    for word in abstract.split():
        if mention := _MENTION.fullmatch(word):
            i = int(mention[2])
            if i < len(kinds) and kinds[i] != f"<{mention[1]}>":
                raise _Invalid(f"the abstract mentions {word}, but entity {i} is of type {kinds[i]}")
            target.append(i)
        else:
            target.append(word)
    words = (title.lower() if lowercase else title).split()
    graph = Graph(words, entities, kinds, relations, [target], [""], plan)
    return graph if find_problem(graph) else Graph(*_fields(graph), [filled(target, entities)], plan)


def _fields(graph: Graph) -> tuple[list[str], list[list[str]], list[str], list[Relation], list[list[Token]]]:
    return graph.title, graph.entities, graph.types, graph.relations, graph.targets


def _integers(text: str, what: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise _Invalid(f"{what} {text.strip()[:40]!r}: expected integers") from None


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[BinaryIO]:
    try:
        if member is None:
            with open_bytes(path) as file:
                yield file
            return
        with open_bytes(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for item in archive:
                if item.isfile() and item.name.rsplit("/", 1)[-1] == member:
                    content = archive.extractfile(item)
                    assert content is not None
                    yield content  # type: ignore[misc]
                    return
        raise DataError(f"{path}: has no file {member}")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise DataError(f"{path}: truncated or damaged ({error}); download it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _entries(file: BinaryIO, path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the items of a JSON list with the lines they start in, without reading the file into memory at once."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, line, ended, state = "", 1, False, "["
    while True:
        start = len(text) - len(text.lstrip())
        line, text = line + text.count("\n", 0, start), text[start:]
        if text and state in ("[", ","):
            if state == "," and text[0] == "]":
                return
            if text[0] != state:
                raise DataError(f"{path}, line {line}: expected a list in JSON, but {state!r} is missing")
            text, state = text[1:], "first" if state == "[" else "item"
            continue
        if text and state == "first" and text[0] == "]":
            return
        if text:
            try:
                item, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                if ended or len(text) > _MOST:
                    at = line + error.lineno - 1
                    raise DataError(
                        f"{path}, line {at}: not JSON ({error.msg}); repair the file, or download it again"
                    ) from None
            except (ValueError, RecursionError):
                problem = "JSON with too long a number or too deep brackets"
                raise DataError(f"{path}, line {line}: {problem}; download the file again") from None
            else:
                if end < len(text) or ended:
                    yield line, replace_surrogates(item) if "\\u" in text[:end] else item
                    line, text, state = line + text.count("\n", 0, end), text[end:], ","
                    continue
        if ended:
            raise DataError(f"{path}: ends at line {line}, before the end of its list; download it again")
        raw = file.read(_PIECE)
        ended = not raw
        try:
            text += decode.decode(raw, ended)
        except UnicodeDecodeError:
            raise DataError(f"{path}, after line {line}: not UTF-8; convert the file to UTF-8 text") from None

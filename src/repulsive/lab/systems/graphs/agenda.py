"""AGENDA, abstracts with their knowledge graphs (Koncel-Kedziorski et al., 2019), in both forms it is published in."""

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
from repulsive.lab.systems.graphs.data import Graph, Graphs, Relation, Token, filled, what_is_wrong
from repulsive.lab.text.lines import BadLines, open_bytes, read_lines, whole_characters

_MENTION = re.compile(r"<([a-z]+)_([0-9]{1,9})>")
_TEXTS = ("title", "types", "abstract")
_LISTS = ("entities", "relations")
_PIECE = 1 << 16  # bytes read at a time
_MOST = 1 << 22  # characters in which an entry of the JSON form has ended


def read_relations(path: str | Path) -> list[str]:
    """Names of the relations, one a line, as `relations.vocab` has them.

    Raises:
        DataError: there are none, or one is there twice.
    """
    names = [line.strip() for _, line in read_lines(path) if line.strip()]
    if not names or len(set(names)) != len(names):
        raise DataError(f"{path}: {'has a relation twice' if names else 'empty file'}; it names one relation a line")
    return names


def read_tsv_graphs(path: str | Path, relations: Sequence[str], *, lowercase: bool = True, limit: int = 20) -> Graphs:
    """The processed form: title, entities, types, relations, abstract and sentence plan, separated by tabs.

    Args:
        path: plain, gzip or xz.
        relations: the names that relations are numbers of.
        lowercase: lower-case the titles; all else is published in lower case.
        limit: bad lines that may be skipped.

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
            except _Bad as why:
                bad.skip(number, str(why))
        return _some(graphs, bad)


def read_json_graphs(
    path: str | Path,
    relations: Sequence[str] | None = None,
    *,
    member: str | None = None,
    lowercase: bool = True,
    limit: int = 20,
) -> Graphs:
    """The unprocessed form: a list of JSON objects, read one by one.

    Relations name their entities here. Where two entities have the same words, the first is taken: the processed form
    knows which one it was, this one does not.

    Args:
        path: plain, gzip or xz; or a tar archive.
        relations: the names there may be; None: any.
        member: of a tar archive, the name of the file in it, without folders; nothing is unpacked to disk.
        lowercase: lower-case the titles.
        limit: bad entries that may be skipped.

    Raises:
        DataError: the file is missing, damaged, empty or no list in JSON, or has more bad entries than `limit`.
    """
    graphs = []
    with BadLines(path, limit) as bad, _opened(Path(path), member) as file:
        for number, entry in _entries(file, path):
            try:
                graphs.append(_checked(_from_entry(entry, relations, lowercase)))
            except _Bad as why:
                bad.skip(number, str(why))
        return _some(graphs, bad)


class _Bad(Exception):
    """What is wrong with a line or an entry."""


def _some(graphs: list[Graph], bad: BadLines) -> Graphs:
    if not graphs:
        raise DataError(f"{bad.path}: no usable graph" + (f"; {bad.first[0]}" if bad.first else ""))
    return Graphs(graphs, bad.count)


def _checked(graph: Graph) -> Graph:
    if why := what_is_wrong(graph):
        raise _Bad(why)
    return graph


def _from_fields(fields: list[str], names: Sequence[str], lowercase: bool) -> Graph:
    if len(fields) != 6:
        raise _Bad(f"{len(fields)} columns, where there are 6: title, entities, types, relations, abstract, plan")
    title, entities, types, listed, abstract, plan = fields
    relations: list[Relation] = []
    for triple in filter(None, map(str.strip, listed.split(" ; "))):
        numbers = _integers(triple, "relation")
        if len(numbers) != 3:
            raise _Bad(f"relation {triple!r}: head, relation and tail are three numbers")
        head, name, tail = numbers
        if not 0 <= name < len(names):
            raise _Bad(f"relation {name} is unknown: there are {len(names)}, numbered from 0")
        relations.append((head, names[name], tail))
    named = [words.split() for words in entities.split(" ; ")] if entities.strip() else []
    sentences: list[list[int]] = [[]]
    for node in _integers(plan, "sentence plan"):
        if node == -1:
            sentences.append([])
        else:
            sentences[-1].append(node)
    if sentences.pop():
        raise _Bad("the sentence plan does not end with -1")
    return _graph(title, named, types, relations, abstract, sentences, lowercase)


def _from_entry(entry: Any, names: Sequence[str] | None, lowercase: bool) -> Graph:
    if not isinstance(entry, dict):
        raise _Bad("not a JSON object")
    for key in _TEXTS:
        if not isinstance(entry.get(key), str):
            raise _Bad(f"{key!r} is missing or no text")
    for key in _LISTS:
        if not isinstance(entry.get(key), list) or not all(isinstance(item, str) for item in entry[key]):
            raise _Bad(f"{key!r} is missing or no list of texts")
    numbers: dict[str, int] = {}
    for i, words in enumerate(entry["entities"]):
        numbers.setdefault(words, i)
    relations = [_named_relation(text, numbers, names) for text in entry["relations"]]
    entities = [words.split() for words in entry["entities"]]
    return _graph(entry["title"], entities, entry["types"], relations, entry["abstract"], [], lowercase)


def _named_relation(text: str, numbers: dict[str, int], names: Sequence[str] | None) -> Relation:
    """Head -- NAME -- tail, where an entity may have ` -- ` in it."""
    parts = text.split(" -- ")
    for i in range(1, len(parts) - 1):
        head, tail = " -- ".join(parts[:i]), " -- ".join(parts[i + 1 :])
        if head in numbers and tail in numbers:
            if names is not None and parts[i] not in names:
                raise _Bad(f"relation {parts[i]!r} is unknown; known are {', '.join(names)}")
            return numbers[head], parts[i], numbers[tail]
    raise _Bad(f"relation {text!r} is not two of the entities with a name between, separated by ' -- '")


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
                raise _Bad(f"the abstract mentions {word}, but entity {i} is of type {kinds[i]}")
            target.append(i)
        else:
            target.append(word)
    words = (title.lower() if lowercase else title).split()
    graph = Graph(words, entities, kinds, relations, [target], [""], plan)
    return graph if what_is_wrong(graph) else Graph(*_fields(graph), [filled(target, entities)], plan)


def _fields(graph: Graph) -> tuple[list[str], list[list[str]], list[str], list[Relation], list[list[Token]]]:
    return graph.title, graph.entities, graph.types, graph.relations, graph.targets


def _integers(text: str, what: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise _Bad(f"{what} {text.strip()[:40]!r}: not numbers") from None


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
        raise DataError(f"{path}: truncated or damaged ({error}); fetch it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _entries(file: BinaryIO, path: str | Path) -> Iterator[tuple[int, Any]]:
    """The items of a list in JSON, each with the line it starts in, a piece of the file in memory at a time."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, line, ended, state = "", 1, False, "["
    while True:
        start = len(text) - len(text.lstrip())
        line, text = line + text.count("\n", 0, start), text[start:]
        if text and state in ("[", ","):
            if state == "," and text[0] == "]":
                return
            if text[0] != state:
                raise DataError(f"{path}, line {line}: not a list in JSON: {state!r} is missing")
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
                    raise DataError(f"{path}, line {at}: not JSON ({error.msg}); mend or fetch the file") from None
            except (ValueError, RecursionError):
                told = "a number too long or brackets too deep"
                raise DataError(f"{path}, line {line}: not JSON anybody can read: {told}; fetch the file") from None
            else:
                if end < len(text) or ended:
                    yield line, whole_characters(item) if "\\u" in text[:end] else item
                    line, text, state = line + text.count("\n", 0, end), text[end:], ","
                    continue
        if ended:
            raise DataError(f"{path}: ends at line {line}, before its list does; fetch it again")
        raw = file.read(_PIECE)
        ended = not raw
        try:
            text += decode.decode(raw, ended)
        except UnicodeDecodeError:
            raise DataError(f"{path}, after line {line}: not UTF-8; convert the file to UTF-8 text") from None

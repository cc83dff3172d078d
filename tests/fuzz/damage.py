"""Ways in which a file can be wrong, each drawn by a generator that is given: the same seed does the same damage."""

import gzip
import io
import json
import lzma
import random
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = random.Random
LONG = "9" * 5000  # more digits than Python turns into a number
NUMBERS = ("1" + "0" * 30, "-1", "1e999", "nan", "0", "-0.0", "99999999999", LONG, "1e99999999999", "0x10", "١٢", "1_0")
OUTSIDE = "../../outside.txt"
DEEP = 100_000  # brackets


def damage(folder: Path, files: list[Path], draw: Draw) -> list[str]:
    """Damage one to three files of a folder.

    Args:
        folder: what the files' names are told from.
        files: those that may be damaged.
        draw: of what is done.

    Returns:
        What was done, for the message.
    """
    descriptions = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice(files)
        if not path.is_file() or path.is_symlink():
            continue  # damaged beyond that already
        name = path.relative_to(folder).as_posix()
        if draw.random() < 0.08:
            change = draw.choice(TREE)
            change(path, draw)
        else:
            fitting = _fitting(path)
            change = draw.choice(fitting if draw.random() < 0.5 and fitting else BYTES)
            path.write_bytes(change(path.read_bytes(), draw))
        descriptions.append(f"{change.__name__} of {name}")
    return descriptions


def _fitting(path: Path) -> list[Callable[[bytes, Draw], bytes]]:
    """Damage that only somebody who knows the format can do."""
    name = path.name
    if name.endswith(".safetensors"):
        return [other_tensor]
    if name.endswith(".json"):
        return [other_value, other_value, other_key]
    if name.endswith(".jsonl"):
        return [other_line]
    if name.endswith((".tar.gz", ".tar.xz", ".tgz")):
        return [other_member, other_member, other_content]
    if name.endswith((".gz", ".xz")):
        return [other_content]
    return [other_number, other_field] if name.endswith((".tsv", ".txt", ".vocab", ".de", ".en", ".toml")) else []


# -- bytes ------------------------------------------------------------------------------------------------------------


def truncate(data: bytes, draw: Draw) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def flip(data: bytes, draw: Draw) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 2, 8, 64)) if found else 0):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def cut_out(data: bytes, draw: Draw) -> bytes:
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[last:]


def double_lines(data: bytes, draw: Draw) -> bytes:
    return b"\n".join(line for line in data.split(b"\n") for _ in range(draw.choice((1, 1, 2, 3))))


def shuffle_lines(data: bytes, draw: Draw) -> bytes:
    lines = data.split(b"\n")
    draw.shuffle(lines)
    return b"\n".join(lines)


def drop_lines(data: bytes, draw: Draw) -> bytes:
    return b"\n".join(line for line in data.split(b"\n") if draw.random() < 0.7)


def put_in(data: bytes, draw: Draw) -> bytes:
    """Bytes that are no text, or mean something to a reader."""
    what = draw.choice(
        (
            b"\0",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"\x1f\x8b",
            b"\xfd7zXZ\0",
            b"\r",
            b"\x85",
            b"\xe2\x80\xa8",
            b"\t",
            b"\n",
            b'"',
            b"\\",
            b"{",
            b"]",
            b"\\ud800",
            b" ; ",
            b" -- ",
            b" ||| ",
            b":::",
            draw.randbytes(40),
            b"x" * 70_000,
        )
    )
    for _ in range(draw.choice((1, 1, 5, 50 if len(what) < 50 else 1))):
        place = draw.randrange(len(data) + 1)
        data = data[:place] + what + data[place:]
    return data


def other_encoding(data: bytes, draw: Draw) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(draw.choice(("utf-16", "utf-16-le", "utf-32", "utf-7", "latin-1", "utf-8-sig")), "replace")


def empty(data: bytes, draw: Draw) -> bytes:
    return draw.choice((b"", b"\n", b" \n\t\n", b"\0" * 100, b"{}", b"[]", b"null", b"\xef\xbb\xbf", b"\x1f\x8b"))


def nest(data: bytes, draw: Draw) -> bytes:
    """Brackets deeper than a parser goes, in place of a line or of all."""
    one, other = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"a=[", b"]"), (b"<a>", b"</a>")))
    deep = one * DEEP + other * draw.choice((0, DEEP))
    lines = data.split(b"\n")
    lines[draw.randrange(len(lines))] = deep
    return draw.choice((deep, b"\n".join(lines)))


BYTES = [
    truncate,
    flip,
    cut_out,
    double_lines,
    shuffle_lines,
    drop_lines,
    put_in,
    other_encoding,
    empty,
    nest,
]


# -- formats ----------------------------------------------------------------------------------------------------------


def other_number(data: bytes, draw: Draw) -> bytes:
    """Some numbers are others, as large as a computer or a person can write them."""
    text = data.decode("utf-8", "replace")
    which = draw.choice((0.02, 0.2, 1.0))
    change = lambda match: draw.choice(NUMBERS) if draw.random() < which else match[0]  # noqa: E731
    return re.sub(r"-?\d+(\.\d+)?", change, text).encode()


def other_field(data: bytes, draw: Draw) -> bytes:
    """One field of a line moved, emptied, or something else."""
    lines = data.decode("utf-8", "replace").split("\n")
    place = draw.randrange(len(lines))
    mark = draw.choice(("\t", " ", " ; ", "="))
    fields = lines[place].split(mark)
    fields[draw.randrange(len(fields))] = draw.choice(("", " ", "x" * 300, OUTSIDE, *NUMBERS, "\t", "<pad>", "[SEP]"))
    if draw.random() < 0.3:
        draw.shuffle(fields)
    lines[place] = mark.join(fields)
    return "\n".join(lines).encode()


def other_value(data: bytes, draw: Draw) -> bytes:
    """One value somewhere in JSON of another type."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return truncate(data, draw)
    return json.dumps(_changed(tree, draw, draw.choice((0, 1, 1, 2, 3, 4)))).encode()


def other_key(data: bytes, draw: Draw) -> bytes:
    """One key somewhere in JSON gone, or another."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return flip(data, draw)
    node = tree
    for _ in range(draw.randrange(4)):
        below = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
        below = [one for one in below if isinstance(one, dict | list) and one]
        node = draw.choice(below) if below else node
    if isinstance(node, dict) and node:
        key = draw.choice(list(node))
        value = node.pop(key)
        if draw.random() < 0.6:
            node[draw.choice((OUTSIDE, "", "..", "/etc/hostname", key.upper(), "a\0b", "x" * 300))] = value
    elif isinstance(node, list) and node:
        node.pop(draw.randrange(len(node)))
    return json.dumps(tree).encode()


def other_line(data: bytes, draw: Draw) -> bytes:
    """The same in one line of a file of JSON lines."""
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    lines[place] = draw.choice((other_value, other_key))(lines[place], draw)
    return b"\n".join(lines)


def other_tensor(data: bytes, draw: Draw) -> bytes:
    """One tensor of a safetensors file of another name, type, shape or content."""
    import torch
    from safetensors.torch import load, save

    try:
        tensors = load(data)
    except Exception:  # damaged already
        return truncate(data, draw)
    if not tensors:
        return empty(data, draw)
    name = draw.choice(sorted(tensors))
    found = tensors.pop(name)
    kind = draw.randrange(8)
    if kind == 0:
        return save(tensors)
    if kind == 1:
        name = draw.choice((f"{name}x", "", OUTSIDE, "values7"))
    changes = {
        2: lambda x: x.float() + 0.5,
        3: lambda x: -x.int() - 5 if not x.is_floating_point() else x * torch.nan,
        4: lambda x: torch.full_like(x, 127) if x.dtype != torch.bool else ~x,
        5: lambda x: x.flatten()[: len(x.flatten()) // 2],
        6: lambda x: x.unsqueeze(0),
        7: lambda x: x.new_zeros(0) if draw.random() < 0.5 else x.to(torch.int64),
    }
    tensors[name] = changes[kind](found).contiguous() if kind in changes else found
    return save(tensors)


def other_content(data: bytes, draw: Draw) -> bytes:
    """What is compressed is damaged, and compressed again."""
    package = lzma if data.startswith(b"\xfd7zXZ") else gzip
    try:
        inner = package.decompress(data)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return flip(data, draw)
    return package.compress(draw.choice(BYTES)(inner, draw))


def other_member(data: bytes, draw: Draw) -> bytes:
    """One member of an archive damaged, renamed, or something else than a file."""
    kind = "xz" if data.startswith(b"\xfd7zXZ") else "gz"
    members = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for info in archive:
                file = archive.extractfile(info) if info.isfile() else None
                members.append((info, file.read() if file else b""))
    except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError):
        return flip(data, draw)
    if not members:
        return truncate(data, draw)
    info, content = members.pop(draw.randrange(len(members)))
    how = draw.randrange(6)
    if how < 4:
        content = draw.choice(_fitting(Path(info.name)) or BYTES)(content, draw)
    elif how == 4:
        info.name = draw.choice((OUTSIDE, "/etc/hostname", "", "a" * 300, info.name.upper()))
    else:
        info.type, info.linkname = draw.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)), OUTSIDE
        content = b""
    info.size = len(content)
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
        for one, inner in [*members, (info, content)]:
            archive.addfile(one, io.BytesIO(inner))
    return written.getvalue()


def _changed(node: Any, draw: Draw, depth: int) -> Any:
    """A tree with one value of another type, `depth` levels down or where the tree ends."""
    if depth and isinstance(node, dict) and node:
        key = draw.choice(list(node))
        return {**node, key: _changed(node[key], draw, depth - 1)}
    if depth and isinstance(node, list) and node:
        place = draw.randrange(len(node))
        return [*node[:place], _changed(node[place], draw, depth - 1), *node[place + 1 :]]
    deep: Any = []
    for _ in range(50):
        deep = [deep]
    other = (None, True, -1, 0, 10**30, 1e308, float("nan"), "", "x", OUTSIDE, "\ud800", [], {}, [None], {"a": 1}, deep)
    return draw.choice(other)


# -- trees ------------------------------------------------------------------------------------------------------------


def missing(path: Path, draw: Draw) -> None:
    path.unlink()


def folder_instead(path: Path, draw: Draw) -> None:
    path.unlink()
    path.mkdir()
    if draw.random() < 0.5:
        (path / "something").write_text("else")


def link_to_itself(path: Path, draw: Draw) -> None:
    path.unlink()
    path.symlink_to(path.name)


def link_to_nothing(path: Path, draw: Draw) -> None:
    path.unlink()
    path.symlink_to("nothing here")


def no_folder(path: Path, draw: Draw) -> None:
    shutil.rmtree(path.parent)


TREE = [missing, missing, folder_instead, link_to_itself, link_to_nothing, no_folder]

"""The text that is measured on: real documentation and source code that every development environment has.

Random or repeated text flatters a tokenizer whose speed comes from remembering words, so the corpus is every readable
file of the Python library, the installed packages, the system's headers and its documentation: one document a file, 50
bytes to 300 kB, valid UTF-8, each content once. Documents come in the order of their hash: neighbors are strangers, as
in a shuffled crawl, any prefix is a fair sample, and the same environment gives the same bytes. Some 500 MB, made once
in about a minute. Environments differ, which is why only ratios taken on the same corpus are reported.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

SUFFIXES = frozenset(
    {".py", ".pyi", ".md", ".rst", ".txt", ".html", ".css", ".sh", ".yaml", ".yml", ".toml", ".js", ".mjs", ".ts"}
    | {
        ".h",
        ".hh",
        ".hpp",
        ".c",
        ".cc",
        ".cpp",
        ".cu",
        ".cuh",
        ".rs",
        ".go",
        ".pl",
        ".pm",
        ".pod",
        ".el",
        ".tcl",
        ".lua",
    }
)
SYSTEM = (
    "/usr/include",
    "/usr/share",
    "/usr/local/include",
    "/usr/lib/node_modules",
    "/usr/lib/python3",
    "/usr/lib/perl5",
)
SMALLEST, LARGEST = 50, 300_000
ASKED = 500_000_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """A JSONL file of `{"text", "path"}`, its size in bytes and its number of documents."""

    path: str
    size: int
    documents: int


def build(folder: Path) -> Corpus:
    """The corpus kept in `folder`, made if it is missing: `ASKED` bytes, or what there is (see `size`)."""
    return _kept(folder / "corpus.jsonl", lambda: _until(ASKED, _documents()))


def first(whole: Corpus, size: int) -> Corpus:
    """The first documents of a corpus, `size` bytes at most; all of it where it has no more."""
    if whole.size <= size:
        return whole
    path = Path(whole.path).with_name(f"corpus_{size // 1_000_000}_mb.jsonl")
    return _kept(path, lambda: _until(size, _lines(Path(whole.path))))


def _kept(path: Path, lines: Callable[[], Iterator[bytes]]) -> Corpus:
    """The corpus at `path`; its description beside it is written last, so that half a corpus is never used."""
    described = path.with_suffix(".json")
    if described.exists() and path.exists():
        return Corpus(str(path), **json.loads(described.read_text("utf-8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    size = documents = 0
    with path.open("wb") as out:
        for line in lines():
            size += out.write(line)
            documents += 1
    described.write_text(json.dumps({"size": size, "documents": documents}), encoding="utf-8")
    return Corpus(str(path), size, documents)


def _until(size: int, lines: Iterator[bytes]) -> Iterator[bytes]:
    taken = 0
    for line in lines:
        taken += len(line)
        if taken > size:
            return
        yield line


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        yield from lines


def _documents() -> Iterator[bytes]:
    """Every document as a line of JSON, by hash of the content; the texts are read twice rather than held."""
    by_content: dict[bytes, str] = {}
    for path in _files():
        content = _text(path)
        if content:
            by_content.setdefault(xxhash.xxh3_128_digest(content), path)
    for _, path in sorted(by_content.items()):
        yield orjson.dumps({"text": _text(path).decode(), "path": path}) + b"\n"


def _text(path: str) -> bytes:
    """The file's content if it is a document, else nothing."""
    try:
        content = Path(path).read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):  # unreadable here, or not text
        return b""
    return content if SMALLEST <= len(content) <= LARGEST else b""


def _files() -> Iterator[str]:
    """Paths of all candidates, each once, in a fixed order."""
    places = sysconfig.get_paths()
    seen: set[str] = set()
    for root in (places["purelib"], places["platlib"], places["stdlib"], *SYSTEM):
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = f"{folder}/{name}"
                if Path(name).suffix in SUFFIXES and path not in seen:
                    seen.add(path)
                    yield path

"""Decode published rows: text from the stored shards, with loss mask, roles and source.

This is the last check before training, so the sources aren't read. Ids are from the packed file (or the `.bin`) and
are decoded with the manifest's tokenizer, whose content must be unchanged. The result is a neutral model (packs of
sub-sequences of passages) that `rendered_view` shows in a terminal and as HTML, and `view_record` turns into JSON. A pack of 4,096 tokens
takes 2 to 40 ms: the later it is in its row group of 500, the longer.

A passage is decoded as a whole. Byte-level vocabularies may spell a character in several tokens. If a border splits one, both
sides show U+FFFD, although the ids are correct.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
from tokenmill.tasks.dataset.dataset import open_dataset
from tokenmill.tasks.dataset.parts import DocumentId, ShardPart, parts_of, parts_of_document
from tokenmill.tasks.dataset.stored import PADDING, Row
from tokenmill.tasks.errors import InputError

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of one role, all trained on or all not. Padding has a count and no text."""

    role: str
    trained: bool
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class SubSequence:
    """The tokens of one document in a pack: `number` counts from 0 in the pack, `line` from 1 in the source file.

    `line` is None after a gap in the shards, and for bin/idx in shards without the fates of rows. `file`, `start` and `stop` are
    the shard's slice. `offset` counts the tokens of the document before these. `origin` is the original file and line
    if an earlier preparation published `file`, as far as that was looked up.
    """

    document: str
    number: int
    file: str
    start: int
    stop: int
    line: int | None
    passages: list[Passage]
    offset: int = 0
    origin: str | None = None

    @property
    def tokens(self) -> int:
        return sum(passage.tokens for passage in self.passages)

    @property
    def trained(self) -> int:
        return sum(passage.tokens for passage in self.passages if passage.trained)


@dataclass(frozen=True, slots=True)
class Pack:
    """One stored row, or one sample of a training step. A document of a `.bin` is a pack of one sub-sequence, without a size.

    `tokens`, `padding` and `count` (of sub-sequences) refer to the whole row; `sequences` may be only some of it. `sample`
    counts from 0 in its step. For a sample of documents, `row` is the first document of `file`.
    """

    dataset: str
    file: str
    row: int
    tokens: int
    padding: int
    pack_size: int | None
    count: int
    sequences: list[SubSequence]
    sample: int | None = None

    @property
    def fill(self) -> float | None:
        """Stored tokens as a share of the pack's size."""
        return self.tokens / self.pack_size if self.pack_size else None


@dataclass(frozen=True, slots=True)
class View:
    """Rows of a preparation of type `sft` or `pretrain`."""

    path: str
    type: str
    tokenizer: str
    packs: list[Pack]


def view_output(
    output_dir: str, *, doc: str | None = None, dataset: str | None = None, seed: int | None = None, rows: int = 1
) -> View:
    """Return the first `rows` packs (documents for bin/idx) of a preparation, or with a `seed`, random ones.

    `dataset` restricts the rows to one dataset. `doc` shows every sub-sequence of one document instead. Raises InputError for
    an unknown dataset or document and for a changed tokenizer, RunError for a damaged file.
    """
    data = open_dataset(output_dir)
    if data.kind.tokens is None:
        raise InputError(f"{data.path}: holds a preparation of type {data.type!r}; view shows pretrain and sft")
    parts = parts_of(data.manifest, dataset)
    decode = data.tokenizer.decode
    tokenizer = data.manifest["settings"]["tokenizer"]["model"]
    packs: list[Pack] = []
    if doc is not None:
        wanted = DocumentId.parse(doc)
        for part in (parts := parts_of_document(parts, wanted)):
            documents = part.numbers_of(wanted.key, wanted.number)
            packs += [decoded(part, row, decode, documents) for row in part.rows_with(documents)]
        if not packs:  # the shard is known, but packs have none of this row
            key = next(key for key in parts[0].shards if key.startswith(wanted.key))
            shard = f"shard {key} of {parts[0].sources}"
            raise InputError(
                f"--doc: {shard} doesn't have document {wanted.number}: it was dropped, or the number is too large"
            )
        return View(data.path, data.type, tokenizer, packs)
    if rows < 1:
        raise InputError(f"--limit: {rows} shows no rows; use 1 or more")
    ends = list(itertools.accumulate(part.rows for part in parts))
    rows = min(rows, ends[-1])
    # Distinct rows, each as likely as any other: the manifest has their number, so no file is opened for the choice
    numbers = range(rows) if seed is None else Random(seed).sample(range(ends[-1]), rows)  # noqa: S311 - no secret
    for number in numbers:
        place = bisect_right(ends, number)
        packs.append(decoded(parts[place], number - ends[place] + parts[place].rows, decode))
    return View(data.path, data.type, tokenizer, packs)


def decoded(
    part: ShardPart,
    number: int,
    decode: Decode,
    documents: Collection[int] | None = None,
    tokens: tuple[np.ndarray, np.ndarray] | None = None,
) -> Pack:
    """Decode a row: all of it, or only some documents. `tokens` are the result of `read_pack`."""
    row = part.row(number, tokens)
    borders = itertools.pairwise([*row.starts.tolist(), len(row.ids)])
    sequences = [
        sub_sequence(part, found, place, list(passages_of(row, start, stop, decode)))
        for place, (found, (start, stop)) in enumerate(zip(row.documents.tolist(), borders, strict=True))
        if documents is None or found in documents
    ]
    size = len(row.ids), row.padding, row.pack_size, len(row.starts)
    return Pack(part.dataset, part.stored, number, *size, sequences)


def sub_sequence(part: ShardPart, document: int, number: int, passages: list[Passage], offset: int = 0) -> SubSequence:
    """Return the tokens of document `document` of a part, as number `number` of a row."""
    source, line = part.source(document)
    name = part.document(document)
    return SubSequence(name, number, source.file, source.start, source.stop, line, passages, offset)


def passages_of(row: Row, start: int, stop: int, decode: Decode) -> Iterator[Passage]:
    """Yield the runs of equal role and loss mask in `[start, stop)`."""
    roles, trained = row.roles[start:stop], row.trained[start:stop]
    # A border is where the role changes, or whether tokens are trained on
    borders = np.flatnonzero((roles[1:] != roles[:-1]) | (trained[1:] != trained[:-1])) + start + 1
    for first, last in itertools.pairwise([start, *borders.tolist(), stop]):
        role = row.role_names[int(row.roles[first])]
        text = "" if role == PADDING else decode(row.ids[first:last].tolist())
        yield Passage(role, bool(row.trained[first]), last - first, text)


def view_record(view: View) -> dict[str, Any]:
    """Return the view as a JSON record for the next command, with unescaped text; `path` is the folder."""
    packs = [{**asdict(pack), "fill": pack.fill} for pack in view.packs]
    return {"view": {"path": view.path, "type": view.type, "tokenizer": view.tokenizer, "packs": packs}}

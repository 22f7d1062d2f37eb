"""`open_dataset(OUT)`: a published output, opened. It is `tokenmill.open`, and what all commands read outputs with.

    data = tokenmill.open("output/sft")
    for part in data.parts(split="train"):
        for pack in data.packs(part):
            pack.ids, pack.trained, pack.starts      # int32 [tokens], bool [tokens], int32 [sequences]
            data.origin(part, pack.documents[0])     # the file and line that the pack's first sequence was made of

Everything is read when it is asked for, from a local folder or an object store, and checked as far as it is read.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import InputError, RunError, nearest
from tokenmill.tasks.shards.kinds import KINDS
from tokenmill.tasks.shards.manifest import join_published, open_manifest, split_of, stored_entries
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.opening import open_source
from tokenmill.tasks.storage import absolute, join, open_binary
from tokenmill.tasks.tokenize.load import recorded_vocabulary
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .fates import FOLLOWED, Fate, fate_of
from .index import ShardIndex
from .parts import LEADING, WINDOW
from .stored import PADDING, Row, StoredDocuments, pack_batches

# How rows are published: documents of a `.bin/.idx` pair, packs in Parquet, rows in Parquet, or JSON Lines; empty
# without any.
Format = Literal["documents", "packs", "parquet", "lines", ""]

COMPRESSIONS: Mapping[str, Literal["gzip", "zstd"]] = {"gz": "gzip", "zst": "zstd"}
ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Part:
    """A published file: its dataset (`split/name` of a blend with splits), its split, and its number of documents.

    `place` is its path or URI, for a `.bin/.idx` pair without the ending. Leading packs count the documents of all packs.
    """

    dataset: str
    split: str
    place: str
    documents: int


class Dataset(ShardIndex):
    """A published output. `path` is its absolute folder, `type` its kind, `manifest` its full record."""

    @property
    def format(self) -> Format:
        """How its rows are published."""
        known: Mapping[str, Format] = {"parquet": "parquet", "jsonl": "lines"}
        name = next((file.place.rpartition("/")[2] for file in self.files_of_rows), "")
        ending = name.partition(".")[2].partition(".")[0]  # `jsonl` of `part-0.jsonl.zst`
        return self.kind.tokens or known.get(ending, "")

    @property
    def splits(self) -> list[str]:
        """The splits with documents: train, valid, test, then others by name."""
        return in_order({part.split for part in self._published})

    def parts(self, split: str | None = None, dataset: str | None = None) -> list[Part]:
        """Return the published files, dataset by dataset, of one split or dataset or of all. Raises InputError for an unknown one."""
        for option, value, known in (
            ("split", split, self.splits),
            ("dataset", dataset, {part.dataset for part in self._published}),
        ):
            if value is not None and value not in known:
                raise InputError(f"{option}: {value!r} isn't in {self.path}; {nearest(value, known)}")
        return [part for part in self._published if split in {None, part.split} and dataset in {None, part.dataset}]

    @cached_property
    def _published(self) -> list[Part]:
        """Row files, and the leading packs in groups that weights read only in part."""
        found: list[Part] = []
        for place in (join(self.path, file["path"]) for file in self.manifest["files"]):
            if LEADING.fullmatch(place):
                part, _ = self.names.document(place, 0)
                own = [self.entries[member.shard] for member in part.members]
                documents = sum(entry["documents"].get(part.name, 0) for entry in own)
                found.append(Part(dataset_name(own[0]["split"], part.dataset), part.split, place, documents))
        return [*self.files_of_rows, *found]

    @cached_property
    def files_of_rows(self) -> list[Part]:
        """The published files with rows, each content once, dataset by dataset."""
        found: list[Part] = []
        # Of tokens, a later stage's files are published; of rows, such files are further views of them, as pools are.
        for entry in (entry for _, entry in stored_entries(self.manifest)) if self.kind.tokens else self.entries:
            for part, names in entry["published"].items():
                documents = entry["documents"].get(part, sum(entry["documents"].values()))
                if names and documents:
                    name = dataset_name(entry["split"], entry["dataset"])
                    place = join_published(self.path, names[0])  # the other names have the same content
                    found.append(Part(name, split_of(entry, part), place, documents))
        return sorted(found, key=lambda part: (part.dataset, [*SPLITS, part.split].index(part.split), part.split))

    def documents(self, part: Part) -> Iterator[np.ndarray]:
        """Yield the ids of each document in a part, in order; in packs, each sequence without padding.

        Raises InputError for rows that aren't tokenized, RunError for a damaged file.
        """
        if self.format == "documents":
            for ids, lengths in StoredDocuments(part.place).batches(WINDOW):
                yield from np.split(ids, np.cumsum(lengths[:-1]))
            return
        # Padding follows a sequence, up to the start of the next one
        for pack in self.packs(part):
            kept = pack.roles != pack.role_names.index(PADDING)
            for start, stop in pairwise([*pack.starts.tolist(), len(pack.ids)]):
                yield pack.ids[start:stop][kept[start:stop]]

    def packs(self, part: Part) -> Iterator[Row]:
        """Yield the packs of a part, in order. Raises InputError for an output without packs, RunError for a damaged file."""
        self._require("packs", "documents" if self.format == "documents" else "rows")
        for batch in pack_batches(part.place):
            yield from batch.rows

    def rows(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the rows of a part as dicts. Raises InputError for an output of tokens."""
        if self.format == "lines":
            source = SourceFile(part.place, 1, "jsonl", COMPRESSIONS.get(part.place.rpartition(".")[2]))
            with open_source(source) as stream:
                yield from map(orjson.loads, stream)
            return
        self._require("parquet", self.format)
        with open_binary(part.place) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(ROWS_AT_ONCE):
                yield from batch.to_pylist()

    def _require(self, wanted: Format, other: str) -> None:
        if self.format != wanted:
            name = {"parquet": "rows"}.get(wanted, wanted)
            raise InputError(f"{self.path}: holds {self.type} data, which has no {name}; read its {other}()")

    def origin(self, part: Part, number: int) -> tuple[str, int]:
        """Return the source file and line (from 1) of document or row `number` of a part, from 0; of packs, of a number in `documents`.

        Raises IndexError for an unknown document, RunError for missing or damaged files.
        """
        packed = self.format == "packs"
        stored, document = self.names.document(part.place, 0 if packed else int(number))
        if packed:
            origin, line = stored.source(int(number))
            if line is None:
                raise RunError(f"{origin.file}: slices before this document are missing here, so its line isn't known")
            return origin.file, line
        shard = self.shard_of(stored)
        origin, line = self.source(shard, self.source_row(shard, stored.name, document))
        return origin.file, line

    def fate(self, file: str, line: int) -> list[Fate]:
        """What became of the line (from 1) of a source file, once for every time that it was read.

        Raises InputError for scores, whose rows are not followed, and RunError for missing or damaged files.
        """
        require_followed(self)
        return [fate_of(self, *found) for found in self.rows_at(file, line)]

    @cached_property
    def tokenizer(self) -> Vocabulary:
        """The tokenizer that it was made with. Raises InputError if it isn't found here or has changed."""
        return recorded_vocabulary(self.manifest)


def open_dataset(output_dir: str | PathLike[str]) -> Dataset:
    """Open a published output. Raises InputError if there is none, RunError if the run failed."""
    path = absolute(fspath(output_dir))
    manifest = open_manifest(path)
    if manifest["type"] not in KINDS:
        raise InputError(f"{path}: holds a {manifest['type']}, not a preparation; read its tables")
    return Dataset(path, manifest)


def require_followed(data: Dataset) -> Dataset:
    """Return the output, if its rows can be followed; else raises InputError."""
    if data.type in FOLLOWED:
        return data
    raise InputError(
        f"{data.path}: holds {data.type!r}, which publishes no documents; give the folder of the rows behind it, an "
        f"output of {', '.join(FOLLOWED)}"
    )


def in_order(names: Collection[str]) -> list[str]:
    """Splits as train, valid, test; other names after them, sorted."""
    return [*(split for split in SPLITS if split in names), *sorted(set(names) - set(SPLITS))]


def dataset_name(split: str, name: str) -> str:
    """Return the name of a dataset: with its split, if the blend has splits."""
    return name if split == "datasets" else f"{split}/{name}"

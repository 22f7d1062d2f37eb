"""The measurements of a report in published files: lengths, tokens per byte, masks by role, samples.

Counts of documents and tokens are exact, from the manifest. Distributions are of the first documents of every dataset and
split, at most MOST_DOCUMENTS or MOST_PACKS, so that a report on terabytes takes seconds. Nothing here depends on when or
where a run took place.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.blend.models import listed_sources
from tokenmill.tasks.chat.encoding import ROLES
from tokenmill.tasks.dataset.dataset import COMPRESSIONS, Dataset, Part, dataset_name, in_order, open_dataset
from tokenmill.tasks.dataset.stored import IDS, STARTS, TOKENS, PackBatch, StoredDocuments, pack_batches
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.manifest import derived_entries, entry_files, split_of
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest, ShardEntry
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.opening import blocks, open_source
from tokenmill.tasks.storage import open_binary
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .view import Passage, passages_of

MOST_DOCUMENTS, MOST_PACKS = 1_000_000, 1_000  # documents, and packs, of a dataset and split whose lengths are measured

# Of a dataset and split, the first tokens that are decoded, and the first bytes of rows that are read as JSON.
MOST_TOKENS, MOST_BYTES = 20_000, 1_000_000

SAMPLE_TOKENS, SAMPLE_CHARACTERS = 300, 1_500  # the size of a sample
MOST_SAMPLES = 12

# Fields in which rows state their language, their domain, and the like
NAMED = ("language", "lang", "domain", "category", "meta_domain", "meta_effort")

# Columns that count the tokens of a row, in order of preference
LENGTHS = ("stats_token_len", "scored_tokens", "total_token_count", "token_count", "tokens")

TEXTS = ("text", "embed_text", "messages_json")
ROW = "row"  # the role of a row that is shown as JSON


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of the first documents of a dataset and split; `documents` is the number of all."""

    dataset: str
    split: str
    documents: int
    lengths: np.ndarray


@dataclass(frozen=True, slots=True)
class Density:
    """The tokens of the first documents of a dataset, and the UTF-8 bytes of their text."""

    dataset: str
    documents: int
    tokens: int
    size: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The first packs of a split: the length of each in tokens, and stored and trained tokens by role."""

    split: str
    packs: int
    lengths: np.ndarray
    by_role: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of a document."""

    dataset: str
    split: str
    passages: Sequence[Passage]


class Measured(Dataset):
    """A published output, and the measurements in its files so far."""

    @cached_property
    def accounts(self) -> Sequence[ShardEntry]:
        """The entries of the manifest that count documents, and after them those that count only drops."""
        shards, derived = self.manifest["shards"], derived_entries(self.manifest)
        packs = derived if self.kind.tokens == "packs" else []
        return [*packs, *({**entry, "documents": {}, "tokens": {}} for entry in shards)] if packs else shards

    @cached_property
    def fates(self) -> dict[tuple[str, str], int]:
        """What became of rows: counts by dataset, and by split or reason of a drop."""
        found: dict[tuple[str, str], int] = {}
        for entry in self.accounts:
            name = dataset_name(entry["split"], entry["dataset"])
            ends = {split_of(entry, part): count for part, count in entry["documents"].items()}
            for end, count in [*ends.items(), *entry["drops"].items()]:
                if count:
                    found[name, end] = found.get((name, end), 0) + count
        # In the order of a chart: by split or reason, and then by dataset
        names, ends = dict.fromkeys(name for name, _ in found), in_order({end for _, end in found})
        return {(name, end): found[name, end] for end in ends for name in names if (name, end) in found}

    @cached_property
    def tokens(self) -> dict[tuple[str, str], int]:
        """Published tokens by dataset and split; documents where nothing is tokenized."""
        counted = "tokens" if self.manifest["totals"]["tokens"] else "documents"
        found: dict[tuple[str, str], int] = {}
        for entry in self.accounts:
            for part, count in entry[counted].items():
                ends = dataset_name(entry["split"], entry["dataset"]), split_of(entry, part)
                found[ends] = found.get(ends, 0) + count
        return {ends: count for ends, count in found.items() if count}

    @property
    def groups(self) -> Iterator[tuple[str, str, list[Part]]]:
        for (dataset, split), files in itertools.groupby(self.files_of_rows, lambda file: (file.dataset, file.split)):
            yield dataset, split, list(files)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer, looked for once: a hub that can't be reached takes seconds. Raises InputError if it is not here."""
        if isinstance(self._vocabulary, (InputError, RunError)):
            raise self._vocabulary
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary | InputError | RunError:
        try:
            return self.tokenizer
        except (InputError, RunError) as error:
            return error

    @cached_property
    def lengths(self) -> list[Lengths]:
        """Lengths by dataset and split: in tokens, and where nothing is tokenized, in bytes of a row."""
        found: list[Lengths] = []
        for dataset, split, files in self.groups:
            pieces: list[np.ndarray] = []
            left = MOST_DOCUMENTS
            for piece in itertools.chain.from_iterable(map(self._lengths_in, files)):
                pieces.append(piece[:left])
                left -= len(piece)
                if left <= 0:  # the other files aren't opened
                    break
            lengths = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
            found.append(Lengths(dataset, split, sum(file.documents for file in files), lengths))
        return [each for each in found if len(each.lengths)]

    def _lengths_in(self, file: Part) -> Iterator[np.ndarray]:
        if self.format == "documents":
            yield StoredDocuments(file.place).leading_lengths(MOST_DOCUMENTS)
        elif self.format == "packs":  # of the sequences, because packs are all about as long
            for batch in _first_packs(file, [IDS, STARTS]):
                yield np.diff(batch.begins, append=len(batch.ids))
        elif self.format == "lines":
            yield np.fromiter(map(len, lines_of(file)), np.int64)
        elif counts := _column(file, LENGTHS):
            for batch in _batches(file.place, counts, 65_536):
                yield batch.column(0).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)

    @cached_property
    def densities(self) -> list[Density]:
        """Tokens per byte of each dataset's first documents."""
        found: list[Density] = []
        for dataset, groups in itertools.groupby(self.groups, lambda group: group[0]):
            measured = [each for _, _, files in groups for each in self._sizes_in(files[0])]
            if measured:
                tokens, sizes = zip(*measured, strict=True)
                found.append(Density(dataset, len(measured), sum(tokens), sum(sizes)))
        return found

    def _sizes_in(self, file: Part) -> Iterator[tuple[int, int]]:
        """The tokens, and the bytes of text, of the first documents in a file."""
        if self.format == "parquet":
            counts, texts = _column(file, LENGTHS), _column(file, TEXTS)
            batch = next(_batches(file.place, [*counts, *texts], 256), None) if counts and texts else None
            if batch is not None:
                sizes = compute.call_function("binary_length", [batch.column(texts[0])]).fill_null(0).to_pylist()
                pairs = zip(batch.column(counts[0]).to_pylist(), sizes, strict=True)
                yield from ((tokens, size) for tokens, size in pairs if tokens and size)
            return
        decode = self.vocabulary.decode
        if self.format == "packs":  # of sequences with their template
            tokens = 0
            for batch in pack_batches(file.place, [IDS], 8):
                for ids in np.split(batch.ids, batch.packs[1:-1]):
                    if tokens >= MOST_TOKENS:
                        return
                    tokens += len(ids)
                    yield len(ids), len(decode(ids[:MOST_TOKENS].tolist()).encode(errors="replace"))
            return
        # The documents that fit into the first MOST_TOKENS; the beginning of the first one if it doesn't fit
        pair = StoredDocuments(file.place)
        lengths = pair.leading_lengths(MOST_DOCUMENTS)
        ids = pair.leading_ids(min(int(lengths[:MOST_TOKENS].clip(max=MOST_TOKENS).sum()), MOST_TOKENS))
        ends = np.cumsum(lengths.astype(np.int64))
        whole = max(int(np.searchsorted(ends, MOST_TOKENS, "right")), 1)
        for document in np.split(ids[: min(int(ends[whole - 1]), MOST_TOKENS)], ends[: whole - 1]):
            # The EOS isn't text
            text = document[:-1] if len(document) and document[-1] == self.vocabulary.eos else document
            yield len(text), len(decode(text.tolist()).encode(errors="replace"))

    @cached_property
    def named(self) -> dict[str, Counter[str]]:
        """Count rows by their values in NAMED, in the first rows of each dataset and split; absent fields are omitted."""
        found: dict[str, Counter[str]] = {}
        for _, _, files in self.groups if self.format in {"parquet", "lines"} else ():
            rows = 0
            for file in files:
                if rows >= MOST_DOCUMENTS:
                    break
                rows += file.documents
                for name, counts in (_stated_in_lines if self.format == "lines" else _stated)(file):
                    found.setdefault(name, Counter()).update(counts)
        return found

    @cached_property
    def packed(self) -> list[Packed]:
        found: list[Packed] = []
        for split in self.splits:
            lengths: list[np.ndarray] = []
            stored, trained = np.zeros(len(ROLES), np.int64), np.zeros(len(ROLES), np.int64)
            for batch in itertools.chain.from_iterable(_first_packs(file, TOKENS) for file in self.parts(split)):
                starts = batch.role_begins
                targets = np.add.reduceat(batch.trained.astype(np.int64), starts)  # by run of a role
                stored += np.bincount(batch.roles, np.diff(starts, append=len(batch.ids)), len(ROLES)).astype(np.int64)
                trained += np.bincount(batch.roles, targets, len(ROLES)).astype(np.int64)
                lengths.append(np.diff(batch.packs))
            by_role = {role: (int(stored[at]), int(trained[at])) for at, role in enumerate(ROLES) if stored[at]}
            measured = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
            found.append(Packed(split, len(measured), measured, by_role))
        return found

    @cached_property
    def samples(self) -> list[Sample]:
        """The beginning of the first document of each dataset and split."""
        groups = itertools.islice(self.groups, MOST_SAMPLES)
        return [Sample(dataset, split, self._beginning(files[0])) for dataset, split, files in groups]

    def _beginning(self, file: Part) -> list[Passage]:
        if self.format == "documents":
            pair = StoredDocuments(file.place)
            ids = pair.leading_ids(min(int(pair.leading_lengths(1)[0]), SAMPLE_TOKENS))
            return [Passage("text", True, len(ids), self.vocabulary.decode(ids.tolist()))]
        if self.format == "packs":
            row = next(next(pack_batches(file.place, rows=1)).rows)
            stop = min(int(row.starts[1]) if len(row.starts) > 1 else len(row.ids), SAMPLE_TOKENS)
            return list(passages_of(row, 0, stop, self.vocabulary.decode))
        if self.format == "lines":
            return [_as_json(orjson.loads(text)) for text in itertools.islice(lines_of(file), 1)]
        for name in _column(file, TEXTS):
            for batch in _batches(file.place, [name], 1):
                return [Passage("text", False, 0, str(batch.column(0)[0].as_py())[:SAMPLE_CHARACTERS])]
        names = [field.name for field in _schema(file) if not pa.types.is_nested(field.type)]
        first = next(_batches(file.place, names, 1), None)
        return [] if first is None else [_as_json(first.to_pylist()[0])]


def measured(output_dir: str, known: Mapping[str, Receipt] = MappingProxyType({})) -> Measured:
    """Return the published preparation in a folder, of which some receipts are known; errors as in `open_dataset`."""
    data = open_dataset(output_dir)
    return Measured(data.path, data.manifest, known)


def _batches(place: str, names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    with open_binary(place) as stream:
        yield from pq.ParquetFile(stream).iter_batches(batch_size=rows, columns=names)


def _first_packs(file: Part, columns: Sequence[str]) -> Iterator[PackBatch]:
    packs = 0
    for batch in pack_batches(file.place, columns, 250):
        yield batch
        packs += len(batch)
        if packs >= MOST_PACKS:
            return


def _column(file: Part, names: Sequence[str]) -> list[str]:
    """The first of these columns that a Parquet file has."""
    known = _schema(file).names
    return [name for name in names if name in known][:1]


def _schema(file: Part) -> pa.Schema:
    with open_binary(file.place) as stream:
        return pq.read_schema(stream)


def lines_of(file: Part) -> Iterator[bytes]:
    """Yield the whole lines in the first MOST_BYTES, without their ends."""
    ending = file.place.rpartition(".")[2]
    source = SourceFile(file.place, 1, "jsonl", COMPRESSIONS.get(ending))
    with closing(open_source(source)) as stream:
        content = b""
        for block in blocks(source, stream):
            content += block
            if len(content) > MOST_BYTES:
                break
    *whole, _ = content.split(b"\n")  # the last line may be cut
    yield from whole or [content]


def _stated(file: Part) -> Iterator[tuple[str, Mapping[str, int]]]:
    """The values of a Parquet file's text columns that NAMED lists."""
    names = [field.name for field in _schema(file) if field.name in NAMED and pa.types.is_string(field.type)]
    for batch in _batches(file.place, names, 65_536) if names else ():
        for name, column in zip(names, batch.columns, strict=True):
            counts = column.drop_null().value_counts()
            if len(counts):
                yield name, dict(zip(*(counts.field(at).to_pylist() for at in (0, 1)), strict=True))


def _stated_in_lines(file: Part) -> Iterator[tuple[str, Mapping[str, int]]]:
    for row in map(orjson.loads, lines_of(file)):
        yield from ((name, {row[name]: 1}) for name in NAMED if isinstance(row.get(name), str))


def _as_json(row: Mapping[str, Any]) -> Passage:
    return Passage(ROW, False, 0, orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()[:SAMPLE_CHARACTERS])


def sources_of(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """Return the datasets of the blend, by their name in a report."""
    return {
        dataset_name(split, each["name"]): each
        for split, listed in listed_sources(manifest["blend"]).items()
        for each in listed
    }


def drops_by_file(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return the rows and drops of each source file; a bundle counts as its first file."""
    found: dict[str, dict[str, int]] = {}
    for entry in manifest["shards"]:
        first, *others = entry_files(entry)
        name = first["file"] + (f" and {len(others):,} other files" if others else "")
        counts = found.setdefault(name, {"rows": 0, "quarantined": 0})
        for reason, count in {"rows": entry["rows"], "quarantined": entry["quarantined"], **entry["drops"]}.items():
            counts[reason] = counts.get(reason, 0) + count
    return found

"""What a report measures in published files: lengths, tokens per byte, masks by role, samples.

Counts of documents and tokens are exact, from the manifest. Distributions are of the first documents of every dataset and
split, at most MOST_DOCUMENTS or MOST_PACKS, so that a report on terabytes takes seconds. Nothing here depends on when or
where a run took place.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.blend.models import SPLITS, listed_sources
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.manifest import entry_files, split_of, stored_entries
from tokenmill.tasks.shards.published import Publication, join_published, read_publication
from tokenmill.tasks.shards.store import PACKS, PREFIX
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.opening import blocks, open_source
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.binidx import DTYPES, HEADER
from tokenmill.tasks.tokenize.load import recorded_vocabulary
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

MOST_DOCUMENTS, MOST_PACKS = 1_000_000, 1_000
"""Documents, and packs, of a dataset and split whose lengths are measured."""

MOST_TOKENS, MOST_BYTES = 20_000, 1_000_000
"""Of a dataset and split, the first tokens that are decoded, and the first bytes of rows that are read as JSON."""

SAMPLE_TOKENS, SAMPLE_CHARACTERS = 300, 1_500
"""The size of a sample."""

MOST_SAMPLES = 12

NAMED = ("language", "lang", "domain", "category", "meta_domain", "meta_effort")
"""Fields in which rows state their language, their domain, and the like."""

ROW = "row"
"""The role of a row that is shown as JSON."""

COMPRESSIONS: Mapping[str, Literal["gzip", "zstd"]] = {"gz": "gzip", "zst": "zstd"}


@dataclass(frozen=True, slots=True)
class File:
    """A published file of rows: its dataset (`split/name` of a blend with splits), its split, and its documents."""

    dataset: str
    split: str
    place: str
    documents: int


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


class Passage(NamedTuple):
    """Consecutive text of one role, all trained on or all not."""

    role: str
    trained: bool
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of a document."""

    dataset: str
    split: str
    passages: Sequence[Passage]


def in_order(names: Collection[str]) -> list[str]:
    """Splits as train, valid, test; other names after them, sorted."""
    return [*(split for split in SPLITS if split in names), *sorted(set(names) - set(SPLITS))]


def data_set(split: str, name: str) -> str:
    """The name of a dataset in a report: with its split, if the blend has splits."""
    return name if split == "datasets" else f"{split}/{name}"


@dataclass(frozen=True)
class Run:
    """A published preparation, and what was measured in its files so far."""

    publication: Publication

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Its manifest."""
        return self.publication.manifest

    @property
    def stored_as(self) -> str:
        """How its documents are stored: `documents` (bin/idx), `packs`, `parquet` or `lines`; empty if there are none."""
        kind = preparation(self.manifest["type"]).tokens
        ending = next((file.place.partition(".")[2] for file in self.files), "")
        return kind or {"parquet": "parquet"}.get(ending, "lines" if ending.startswith("jsonl") else "")

    @cached_property
    def accounts(self) -> list[Mapping[str, Any]]:
        """The entries of the manifest that count documents, and after them those that count only drops."""
        packs = [entry for folder, entry in stored_entries(self.manifest) if folder == PACKS]
        shards = self.manifest["shards"]
        return [*packs, *({**entry, "documents": {}, "tokens": {}} for entry in shards)] if packs else shards

    @cached_property
    def fates(self) -> dict[tuple[str, str], int]:
        """What became of rows: counts by dataset, and by split or reason of a drop."""
        found: dict[tuple[str, str], int] = {}
        for entry in self.accounts:
            name = data_set(entry["split"], entry["dataset"])
            ends = {split_of(entry, part): count for part, count in entry["documents"].items()}
            for end, count in [*ends.items(), *entry["drops"].items()]:
                if count:
                    found[name, end] = found.get((name, end), 0) + count
        names, ends = dict.fromkeys(name for name, _ in found), in_order({end for _, end in found})
        return {(name, end): found[name, end] for end in ends for name in names if (name, end) in found}

    @cached_property
    def tokens(self) -> dict[tuple[str, str], int]:
        """Published tokens by dataset and split; documents where nothing is tokenized."""
        counted = "tokens" if self.manifest["totals"]["tokens"] else "documents"
        found: dict[tuple[str, str], int] = {}
        for entry in self.accounts:
            for part, count in entry[counted].items():
                ends = data_set(entry["split"], entry["dataset"]), split_of(entry, part)
                found[ends] = found.get(ends, 0) + count
        return {ends: count for ends, count in found.items() if count}

    @cached_property
    def files(self) -> list[File]:
        """The published files of rows, each content once, in order of datasets."""
        found: list[File] = []
        own = {id(entry) for entry in self.manifest["shards"]}
        for folder, entry in stored_entries(self.manifest):
            if id(entry) not in own and folder not in {PREFIX, PACKS}:
                continue
            for part, names in entry["published"].items():
                place = join_published(self.publication.output_dir, names[0]) if names else ""
                documents = entry["documents"].get(part, sum(entry["documents"].values()))
                if place and documents:
                    name = data_set(entry["split"], entry["dataset"])
                    found.append(File(name, split_of(entry, part), place, documents))
        return sorted(found, key=lambda file: (file.dataset, [*SPLITS, file.split].index(file.split), file.split))

    @property
    def groups(self) -> Iterator[tuple[str, str, list[File]]]:
        """The files of each dataset and split."""
        for (dataset, split), files in itertools.groupby(self.files, lambda file: (file.dataset, file.split)):
            yield dataset, split, list(files)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that the data were made with. Raises InputError if it is not here."""
        if isinstance(self._vocabulary, (InputError, RunError)):
            raise self._vocabulary
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary | InputError | RunError:
        """Looked for once, because a hub that can't be reached takes seconds."""
        try:
            return recorded_vocabulary(self.manifest)
        except (InputError, RunError) as error:
            return error

    @cached_property
    def lengths(self) -> list[Lengths]:
        """Lengths by dataset and split: in tokens, and where nothing is tokenized, in bytes of a row."""
        read = {"documents": _indexed, "packs": _packed_lengths, "parquet": _counted, "lines": _line_lengths}[
            self.stored_as
        ]
        found: list[Lengths] = []
        for dataset, split, files in self.groups:
            pieces = list(_up_to(itertools.chain.from_iterable(map(read, files)), MOST_DOCUMENTS))
            lengths = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
            found.append(Lengths(dataset, split, sum(file.documents for file in files), lengths))
        return [each for each in found if len(each.lengths)]

    @cached_property
    def densities(self) -> list[Density]:
        """Tokens per byte of each dataset's first documents."""
        read = {"documents": self._decoded, "packs": self._decoded_packs, "parquet": _texts}[self.stored_as]
        found: list[Density] = []
        for dataset, groups in itertools.groupby(self.groups, lambda group: group[0]):
            measured = [each for _, _, files in groups for each in read(files[0])]
            if measured:
                found.append(
                    Density(
                        dataset, len(measured), sum(each[0] for each in measured), sum(each[1] for each in measured)
                    )
                )
        return found

    @cached_property
    def named(self) -> dict[str, Counter[str]]:
        """Rows by what they state in NAMED, of the first of each dataset and split; fields that no row has are left out."""
        found: dict[str, Counter[str]] = {}
        read = {"parquet": _stated, "lines": _stated_in_lines}.get(self.stored_as)
        if read is None:
            return found
        for _, _, files in self.groups:
            rows = 0
            for file in files:
                if rows >= MOST_DOCUMENTS:
                    break
                rows += file.documents
                for name, counts in read(file).items():
                    found.setdefault(name, Counter()).update(counts)
        return found

    def _decoded(self, file: File) -> Iterator[tuple[int, int]]:
        """Tokens and bytes of the first documents of a bin/idx pair, without the EOS."""
        lengths = next(_indexed(file))
        ids = _first_ids(file, int(lengths[:MOST_TOKENS].clip(max=MOST_TOKENS).sum()))
        ends = np.cumsum(lengths.astype(np.int64))
        whole = max(int(np.searchsorted(ends, MOST_TOKENS, "right")), 1)
        for document in np.split(ids[: min(int(ends[whole - 1]), MOST_TOKENS)], ends[: whole - 1]):
            yield self._measured(document)

    def _measured(self, ids: np.ndarray) -> tuple[int, int]:
        text = ids[:-1] if len(ids) and ids[-1] == self.vocabulary.eos else ids
        return len(text), len(self.vocabulary.decode(text.tolist()).encode(errors="replace"))

    def _decoded_packs(self, file: File) -> Iterator[tuple[int, int]]:
        """The same for the first packs, of sequences with their template."""
        tokens = 0
        for batch in _batches(file.place, ["input_ids"], 8):
            for ids in (row.values.to_numpy() for row in batch.column(0)):
                if tokens >= MOST_TOKENS:
                    return
                tokens += len(ids)
                yield len(ids), len(self.vocabulary.decode(ids[:MOST_TOKENS].tolist()).encode(errors="replace"))

    @cached_property
    def packed(self) -> list[Packed]:
        """The first packs of each split."""
        by_split: dict[str, list[File]] = {}
        for file in self.files:
            by_split.setdefault(file.split, []).append(file)
        return [_packed(split, files) for split, files in ((split, by_split[split]) for split in in_order(by_split))]

    @cached_property
    def samples(self) -> list[Sample]:
        """The beginning of the first document of each dataset and split."""
        read = {
            "documents": self._sampled,
            "packs": self._sampled_pack,
            "parquet": _sampled_row,
            "lines": _sampled_line,
        }
        groups = itertools.islice(self.groups, MOST_SAMPLES)
        return [Sample(dataset, split, read[self.stored_as](files[0])) for dataset, split, files in groups]

    def _sampled(self, file: File) -> list[Passage]:
        ids = _first_ids(file, min(int(next(_indexed(file))[0]), SAMPLE_TOKENS))
        return [Passage("text", True, self.vocabulary.decode(ids.tolist()))]

    def _sampled_pack(self, file: File) -> list[Passage]:
        from tokenmill.tasks.chat.encoding import ROLES

        from .view import passages_of
        from .view_rows import Row

        batch = next(_batches(file.place, list(PACK_COLUMNS), 1))
        ids, mask, starts, role_starts, roles = (batch.column(name).flatten().to_numpy() for name in PACK_COLUMNS)
        trained = _targets(mask)
        each = np.repeat(roles, np.diff(role_starts, append=len(ids)))
        stop = min(int(starts[1]) if len(starts) > 1 else len(ids), SAMPLE_TOKENS)
        row = Row(ids, trained, each, ROLES, starts, starts, None)
        passages = passages_of(row, 0, stop, self.vocabulary.decode)
        return [Passage(each.role, each.trained, each.text) for each in passages]


PACK_COLUMNS = ("input_ids", "loss_mask", "seq_start_id", "role_start", "role")


def run_in(output_dir: str) -> Run:
    """The published preparation in a folder; errors as in `read_publication`."""
    return Run(read_publication(output_dir))


def _up_to(pieces: Iterator[np.ndarray], most: int) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece[:most]
        most -= len(piece)
        if most <= 0:
            return


def _read(place: str, start: int, stop: int) -> bytes:
    system, path = filesystem(place)
    return cast("bytes", system.cat_file(path, start=start, end=stop))


def _header(file: File) -> tuple[np.dtype[np.integer], int]:
    _, _, code, documents, _ = HEADER.unpack(_read(f"{file.place}.idx", 0, HEADER.size))
    return DTYPES[code], documents


def _indexed(file: File) -> Iterator[np.ndarray]:
    """The lengths in an `.idx`, of the first documents."""
    _, documents = _header(file)
    stop = HEADER.size + 4 * min(documents, MOST_DOCUMENTS)
    yield np.frombuffer(_read(f"{file.place}.idx", HEADER.size, stop), "<i4")


def _first_ids(file: File, tokens: int) -> np.ndarray:
    """The first ids of a `.bin`, at most MOST_TOKENS."""
    dtype, _ = _header(file)
    return np.frombuffer(_read(f"{file.place}.bin", 0, min(tokens, MOST_TOKENS) * dtype.itemsize), dtype)


def _batches(place: str, names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        yield from pq.ParquetFile(stream).iter_batches(batch_size=rows, columns=names)


def _first_batches(file: File, names: list[str]) -> Iterator[pa.RecordBatch]:
    """The first MOST_PACKS rows."""
    rows = 0
    for batch in _batches(file.place, names, 250):
        yield batch
        rows += len(batch)
        if rows >= MOST_PACKS:
            return


def _packed_lengths(file: File) -> Iterator[np.ndarray]:
    """The lengths of sequences in the first packs."""
    for batch in _first_batches(file, ["input_ids", "seq_start_id"]):
        starts, offsets = batch.column("seq_start_id"), batch.column("input_ids").offsets.to_numpy()
        packs = starts.value_parent_indices().to_numpy()
        first = offsets[packs] - offsets[0] + starts.flatten().to_numpy()
        yield np.diff(first, append=offsets[-1] - offsets[0])


def _targets(mask: np.ndarray) -> np.ndarray:
    """Whether each token is a target of the loss; the stored mask marks the token before it, never the last of a sequence."""
    trained = np.zeros(len(mask), np.bool_)
    trained[1:] = mask[:-1] == 1
    return trained


def _packed(split: str, files: Sequence[File]) -> Packed:
    from tokenmill.tasks.chat.encoding import ROLES

    lengths: list[np.ndarray] = []
    stored, trained = np.zeros(len(ROLES), np.int64), np.zeros(len(ROLES), np.int64)
    for batch in itertools.chain.from_iterable(_first_batches(file, list(PACK_COLUMNS)) for file in files):
        offsets = batch.column("input_ids").offsets.to_numpy() - batch.column("input_ids").offsets[0].as_py()
        runs = batch.column("role_start")
        starts = offsets[runs.value_parent_indices().to_numpy()] + runs.flatten().to_numpy()
        roles, size = batch.column("role").flatten().to_numpy(), int(offsets[-1])
        targets = np.add.reduceat(_targets(batch.column("loss_mask").flatten().to_numpy()).astype(np.int64), starts)
        stored += np.bincount(roles, np.diff(starts, append=size), len(ROLES)).astype(np.int64)
        trained += np.bincount(roles, targets, len(ROLES)).astype(np.int64)
        lengths.append(np.diff(offsets))
    by_role = {role: (int(stored[at]), int(trained[at])) for at, role in enumerate(ROLES) if stored[at]}
    measured = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    return Packed(split, len(measured), measured, by_role)


LENGTHS = ("stats_token_len", "scored_tokens", "total_token_count", "token_count", "tokens")
"""Columns that count the tokens of a row, in order of preference."""

TEXTS = ("text", "embed_text", "messages_json")


def _column(file: File, names: Sequence[str]) -> list[str]:
    """The first of these columns that a Parquet file has."""
    known = _schema(file).names
    return [name for name in names if name in known][:1]


def _schema(file: File) -> pa.Schema:
    system, path = filesystem(file.place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        return pq.read_schema(stream)


def _counted(file: File) -> Iterator[np.ndarray]:
    for name in _column(file, LENGTHS):
        for batch in _batches(file.place, [name], 65_536):
            yield batch.column(0).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _texts(file: File) -> Iterator[tuple[int, int]]:
    """Tokens and bytes of the first rows with both."""
    counts, texts = _column(file, LENGTHS), _column(file, TEXTS)
    if not counts or not texts:
        return
    batch = next(_batches(file.place, [*counts, *texts], 256), None)
    if batch is not None:
        sizes = compute.call_function("binary_length", [batch.column(texts[0])]).fill_null(0).to_pylist()
        yield from (
            (tokens, size)
            for tokens, size in zip(batch.column(counts[0]).to_pylist(), sizes, strict=True)
            if tokens and size
        )


def lines_of(file: File) -> Iterator[bytes]:
    """The whole lines in the first MOST_BYTES, without their ends."""
    ending = file.place.rpartition(".")[2]
    source = SourceFile(file.place, 1, "jsonl", COMPRESSIONS.get(ending))
    with closing(open_source(source)) as stream:
        content = b""
        for block in blocks(source, stream):
            content += block
            if len(content) > MOST_BYTES:
                break
    *whole, _ = content.split(b"\n")
    yield from whole or [content]


def _line_lengths(file: File) -> Iterator[np.ndarray]:
    yield np.fromiter(map(len, lines_of(file)), np.int64)


def _stated(file: File) -> dict[str, Counter[str]]:
    """What the rows of a Parquet file state in text columns called as NAMED says, without those that state nothing."""
    names = [field.name for field in _schema(file) if field.name in NAMED and pa.types.is_string(field.type)]
    found = {name: Counter[str | None]() for name in names}
    for batch in _batches(file.place, names, 65_536) if names else ():
        for name, column in zip(names, batch.columns, strict=True):
            counts = column.value_counts()
            found[name].update(dict(zip(*(counts.field(at).to_pylist() for at in (0, 1)), strict=True)))
    return {name: kept for name, counts in found.items() if (kept := _without_none(counts))}


def _without_none(counts: Mapping[str | None, int]) -> Counter[str]:
    return Counter({value: count for value, count in counts.items() if value is not None})


def _stated_in_lines(file: File) -> dict[str, Counter[str]]:
    """The same of the first rows of JSON Lines."""
    found: dict[str, Counter[str]] = {}
    for row in map(orjson.loads, lines_of(file)):
        for name in NAMED:
            if isinstance(row.get(name), str):
                found.setdefault(name, Counter())[row[name]] += 1
    return found


def _sampled_row(file: File) -> list[Passage]:
    for name in _column(file, TEXTS):
        for batch in _batches(file.place, [name], 1):
            return [Passage("text", False, str(batch.column(0)[0].as_py())[:SAMPLE_CHARACTERS])]
    names = [field.name for field in _schema(file) if not pa.types.is_nested(field.type)]
    for batch in _batches(file.place, names, 1):
        return [_as_json(batch.to_pylist()[0])]
    return []


def _sampled_line(file: File) -> list[Passage]:
    return [_as_json(orjson.loads(text)) for text in itertools.islice(lines_of(file), 1)]


def _as_json(row: Mapping[str, Any]) -> Passage:
    return Passage(ROW, False, orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()[:SAMPLE_CHARACTERS])


def sources_of(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The datasets of the blend, by their name in a report."""
    return {
        data_set(split, each["name"]): each
        for split, listed in listed_sources(manifest["blend"]).items()
        for each in listed
    }


def drops_by_file(manifest: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The rows and drops of each source file; a bundle counts as its first file."""
    found: dict[str, dict[str, int]] = {}
    for entry in manifest["shards"]:
        first, *others = entry_files(entry)
        name = first["file"] + (f" and {len(others):,} other files" if others else "")
        counts = found.setdefault(name, {"rows": 0, "quarantined": 0})
        for reason, count in {"rows": entry["rows"], "quarantined": entry["quarantined"], **entry["drops"]}.items():
            counts[reason] = counts.get(reason, 0) + count
    return found

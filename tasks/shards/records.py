"""The JSON records of a publication: the type of each field in `manifest.json`, and of each shard in it.

They are dictionaries: a manifest is copied byte for byte with every field that its kind adds, and one of 100,000 shards is read in 1 s.
So the types exist for the checker, which finds misspelled fields. Any other file is an error where it is opened
(`read_manifest`). Docstrings name the fields that only some records have: read these with `get` or after `in`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class FileRecord(TypedDict):
    """A published file: its path in the output folder, its bytes, and their hash."""

    path: str
    size: int
    xxh3_128: str


class SliceRecord(TypedDict):
    """A part of a source file; `start` and `stop` are bytes of plain text, else row groups."""

    file: str
    start: int
    stop: int
    content: str


class ShardEntry(TypedDict):
    """A shard: the source of its rows, its recipe, its counts, and its published names by split.

    `recipe` is a number in the manifest's list. `documents` and `tokens` are by part: `all`, or train, valid and test. Only bundles
    have `files`, only shards about whose rows others decide have `decided`, and `facts` are omitted if there are none.
    """

    dataset: str
    split: str
    place: str
    file: str
    start: int
    stop: int
    files: Sequence[SliceRecord]
    key: str
    recipe: int
    source: Mapping[str, Any]
    decided: Mapping[str, Any]
    rows: int
    documents: Mapping[str, int]
    tokens: Mapping[str, int]
    drops: Mapping[str, int]
    quarantined: int
    truncated: int
    facts: Mapping[str, Any]
    published: Mapping[str, Sequence[str]]


class ShardList(TypedDict):
    """Shards, and recipes: a shard refers to its recipe by number, because a million shards share a few."""

    recipes: Sequence[Mapping[str, Any]]
    shards: Sequence[ShardEntry]


class DatasetTotals(TypedDict):
    """Counts of one dataset; `source_bytes` is the size of its slices as stored."""

    rows: int
    documents: int
    tokens: int
    quarantined: int
    truncated: int
    source_bytes: int
    dropped: Mapping[str, int]


class Totals(DatasetTotals):
    """Counts of a preparation, of its datasets (by `split/name`), and of its splits; `not_read` counts rows by the field that
    wasn't read, if there is one.
    """

    datasets: Mapping[str, DatasetTotals]
    splits: Mapping[str, Mapping[str, int]]
    not_read: Mapping[str, Mapping[str, int]]


class Manifest(ShardList):
    """A preparation, from its blend to each shard. `derived` are shards made of `shards`, if there are any; `volatile` may differ
    between equal runs.

    Only a failed run has a `status` and an `error`, and no totals. Fields below a kind's name are only in its manifests.
    """

    type: str
    blend: Mapping[str, Any]
    settings: Mapping[str, Any]
    totals: Totals
    derived: ShardList
    files: Sequence[FileRecord]
    missing: Sequence[str]
    skipped_files: Mapping[str, int]
    warnings: Sequence[Mapping[str, Any]]
    volatile: Mapping[str, Any]
    status: str
    error: str

    # Pretraining and SFT
    tokenizer: Mapping[str, Any]
    phases: Sequence[Mapping[str, Any]]
    template: Mapping[str, Any]
    sampling: Mapping[str, Any]
    # RL
    train: str
    val: str
    batches: Mapping[str, Any]
    # Harmony, deduplication and filters
    dedup: Mapping[str, Any]
    duplicates: Mapping[str, Any]
    selection: Mapping[str, Any]
    licences: Mapping[str, int]
    personal: Mapping[str, Any]

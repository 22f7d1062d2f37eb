"""The spool: sequences that wait on disk until all lengths of a shard are known and packs can be chosen.

Tokens and masks (5 bytes a token) go into two unnamed temporary files, so memory holds only what packing needs, some
50 bytes a sequence, and nothing is left behind however the process ends: an unnamed file goes with it.
"""

import mmap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, cast

import numpy as np
from tokenmill.tasks.storage import is_local
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


@dataclass(frozen=True, slots=True)
class Spooled:
    """Finished sequences of one part of a shard; sequence i is `[offsets[i], offsets[i + 1])`.

    `ids` int32 and `loss` int8 [tokens] lie on disk; `loss` is shifted: 1 where the next token is trained on. `offsets`
    int64 [sequences + 1]; `documents` int64 [sequences], the row of the slice; `content` uint64 [sequences], a hash of ids
    and loss. Role runs of sequence i are `[runs[i], runs[i + 1])` of `role_starts` (int32, within the sequence) and `roles` (int8).
    """

    ids: np.ndarray
    loss: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    content: np.ndarray
    runs: np.ndarray
    role_starts: np.ndarray
    roles: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, int64."""
        return np.diff(self.offsets)


@dataclass
class Spool:
    """Sequences on their way; `folder` is where the temporary files lie, None for the system's own place."""

    folder: str | None
    _files: list[IO[bytes]] = field(init=False)
    _lengths: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _documents: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _content: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _run_counts: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _role_starts: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _roles: list[np.ndarray] = field(default_factory=list[np.ndarray])

    def __post_init__(self) -> None:
        """Open the two files."""
        self._files = [TemporaryFile(dir=self.folder) for _ in range(2)]  # noqa: SIM115 - closed by `close`

    def append(
        self, ids: np.ndarray, loss: np.ndarray, lengths: np.ndarray, documents: np.ndarray, runs: "Runs"
    ) -> None:
        """Add sequences that lie back to back in `ids` and `loss`; the arrays are those of `Spooled`."""
        for file, array in zip(self._files, (ids, loss), strict=True):
            file.write(np.ascontiguousarray(array).data)
        self._lengths.append(lengths)
        self._documents.append(documents)
        self._content.append(_hashes(ids, loss, lengths))
        self._run_counts.append(runs.counts)
        self._role_starts.append(runs.starts)
        self._roles.append(runs.roles)

    @contextmanager
    def spooled(self) -> Generator[Spooled]:
        """All sequences, mapped into memory as they are read; the files are gone afterwards."""
        try:
            offsets, runs = _offsets(self._lengths), _offsets(self._run_counts)
            ids, loss = (_mapped(file, dtype) for file, dtype in zip(self._files, (np.int32, np.int8), strict=True))
            yield Spooled(
                ids=ids,
                loss=loss,
                offsets=offsets,
                documents=_whole(self._documents, np.int64),
                content=_whole(self._content, np.uint64),
                runs=runs,
                role_starts=_whole(self._role_starts, np.int32),
                roles=_whole(self._roles, np.int8),
            )
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()


@dataclass(frozen=True, slots=True)
class Runs:
    """Role runs of some sequences: how many each has, where each begins within its sequence, and whose it is."""

    counts: np.ndarray
    starts: np.ndarray
    roles: np.ndarray


def spool_folder(store: str) -> str | None:
    """Where to spool: beside the shards, where there is room for them; on an object store, the system's own place."""
    return store if is_local(store) and Path(store).is_dir() else None


def _hashes(ids: np.ndarray, loss: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """xxh3_64 of the ids of each sequence, seeded by that of its loss."""
    ends = np.cumsum(lengths)
    pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    tokens, masks = memoryview(cast("Buffer", ids)), memoryview(cast("Buffer", loss))
    return np.array([xxh3_64_intdigest(tokens[a:b], xxh3_64_intdigest(masks[a:b])) for a, b in pairs], np.uint64)


def _mapped(file: IO[bytes], dtype: type[np.generic]) -> np.ndarray:
    file.flush()
    if not file.tell():
        return np.empty(0, dtype)  # nothing cannot be mapped
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _offsets(counts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_whole(counts, np.int64))])


def _whole(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])

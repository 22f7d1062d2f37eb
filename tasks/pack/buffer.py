"""Sequences on disk until all lengths of a shard are known and packs can be chosen.

Tokens and masks (5 bytes per token) are written to two unnamed temporary files, which disappear when the process ends, however
it ends. Memory holds only what packing needs, about 50 bytes per sequence.
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
class RoleRuns:
    """Role runs of some sequences: `counts` per sequence, `starts` within the sequence (int32), `roles` (int8)."""

    counts: np.ndarray
    starts: np.ndarray
    roles: np.ndarray


@dataclass(frozen=True, slots=True)
class BufferedSequences:
    """Finished sequences of one part of a shard; sequence i is `[offsets[i], offsets[i + 1])`.

    `ids` int32 and `loss` int8 [tokens] are on disk; `loss` is shifted: 1 if the next token is trained on. `offsets` int64
    [sequences + 1]; `documents` int64 [sequences], the row of the slice; `content` uint64 [sequences], a hash of ids and
    loss. Role runs of sequence i are `[runs[i], runs[i + 1])` of `role_starts` (int32, within the sequence) and `roles`
    (int8).
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
class SequenceBuffer:
    """Collects sequences; the temporary files are in `folder`, or in the system's temporary folder if it is None."""

    folder: str | None
    _files: list[IO[bytes]] = field(init=False)
    _lengths: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _documents: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _content: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _runs: list[RoleRuns] = field(default_factory=list[RoleRuns])

    def __post_init__(self) -> None:
        """Open the two files."""
        self._files = [TemporaryFile(dir=self.folder) for _ in range(2)]  # noqa: SIM115 - closed by `close`

    def append(
        self, ids: np.ndarray, loss: np.ndarray, lengths: np.ndarray, documents: np.ndarray, runs: RoleRuns
    ) -> None:
        """Add sequences that lie back to back in `ids` and `loss`; arrays as in `BufferedSequences`."""
        for file, array in zip(self._files, (ids, loss), strict=True):
            file.write(np.ascontiguousarray(array).data)
        self._lengths.append(lengths)
        self._documents.append(documents)
        self._content.append(_hashes(ids, loss, lengths))
        self._runs.append(runs)

    @contextmanager
    def sequences(self) -> Generator[BufferedSequences]:
        """All sequences, memory-mapped; the files are deleted afterwards."""
        try:
            ids, loss = (_mapped(file, dtype) for file, dtype in zip(self._files, (np.int32, np.int8), strict=True))
            yield BufferedSequences(
                ids=ids,
                loss=loss,
                offsets=_offsets(self._lengths),
                documents=_whole(self._documents, np.int64),
                content=_whole(self._content, np.uint64),
                runs=_offsets([each.counts for each in self._runs]),
                role_starts=_whole([each.starts for each in self._runs], np.int32),
                roles=_whole([each.roles for each in self._runs], np.int8),
            )
        finally:
            self.close()

    def close(self) -> None:
        """Delete the files."""
        for file in self._files:
            file.close()


def buffer_folder(store: str) -> str | None:
    """The folder of buffers: beside the shards; None (the system's temporary folder) for an object store."""
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
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _offsets(counts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_whole(counts, np.int64))])


def _whole(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])

"""JSON Lines on their way to a file: rows as bytes, joined a batch at a time, plain or compressed.

zstd at its default level gives files a quarter to an eighth of the size, at some 400 MB/s of text a core. A file is one
frame with a checksum, and frames in a row are one file again, so compressed shards are joined as they are.
"""

from collections.abc import Sequence

import zstandard
from tokenmill.tasks.shards.publish import Publication

from .settings import Compression

ENDINGS: dict[Compression, str] = {"none": "jsonl", "zstd": "jsonl.zst"}
"""How the names of files end."""


class JsonLines:
    """Writes rows to a publication; `end` completes the file, and must be called before the publication ends."""

    def __init__(self, file: Publication, compression: Compression) -> None:
        self._file = file
        self._frame = zstandard.ZstdCompressor(write_checksum=True).compressobj() if compression == "zstd" else None

    def write(self, rows: Sequence[bytes]) -> None:
        r"""Append rows, each of them JSON without a line break; nothing for no rows."""
        if not rows:
            return
        data = b"\n".join([*rows, b""])
        self._file.write(data if self._frame is None else self._frame.compress(data))

    def end(self) -> None:
        """Complete the frame, where there is one."""
        if self._frame is not None:
            self._file.write(self._frame.flush())

"""Where a slice stands in its file, counted in rows: for messages that name file and line.

Slices are known by byte offsets, so the number of the first row has to be counted. That reads the file up to the
slice (some 5 GB/s once cached), which is why only errors ask; published line numbers come from the receipts of the
slices before.
"""

from .content import CHUNK_BYTES
from .files import Slice
from .json_lines import row_start
from .opening import open_source
from .parquet import open_parquet


def first_row(part: Slice) -> int:
    """How many rows of the file stand before the slice; lines for JSONL, so that row n is line n + 1."""
    if part.start == 0:
        return 0
    with open_source(part.file) as stream:
        if part.file.format == "parquet":
            metadata = open_parquet(part.file, stream).metadata
            return sum(metadata.row_group(number).num_rows for number in range(part.start))
        remaining, lines = row_start(stream, part.start), 0
        stream.seek(0)
        while remaining > 0 and (chunk := stream.read(min(CHUNK_BYTES, remaining))):
            lines += chunk.count(b"\n")
            remaining -= len(chunk)
    return lines

"""A whole RL preparation in this process, without Prefect or Dask."""

from functools import partial
from pathlib import Path

import zstandard

from tests.building import build_shards, plan_here, prepare_here
from tests.preparing import write_rows  # noqa: F401 - tests of rows import it from here

NOTHING_HELD_OUT = {"valid": 0, "test": 0}
CHOSEN = {"holdout": NOTHING_HELD_OUT, "max_bad_row_fraction": 1.0}


plan, prepare = partial(plan_here, "rl", **CHOSEN), partial(prepare_here, "rl", **CHOSEN)
build = partial(build_shards, "rl")
"""As in `building`, nothing held out, any share of bad rows, and whatever else is chosen."""


def lines_of(path):
    """The lines of a published file as they are, of zstd as well; only `\\n` ends one."""
    content = Path(path).read_bytes()
    if str(path).endswith(".zst"):
        content = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(content)
    *lines, rest = content.split(b"\n")
    assert rest == b""
    return lines

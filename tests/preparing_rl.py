"""A whole RL preparation in this process, without Prefect or Dask."""

from pathlib import Path

import zstandard

from tests.building import build_shards, plan_here, prepare_here
from tests.preparing import write_rows  # noqa: F401 - beside the others

NOTHING_HELD_OUT = {"valid": 0, "test": 0}


CHOSEN = {"holdout": NOTHING_HELD_OUT, "max_bad_row_fraction": 1.0}


def plan(blend, output_dir, **settings):
    """The plan of `blend`, nothing held out, any share of bad rows, and whatever else is chosen."""
    return plan_here("rl", blend, output_dir, **CHOSEN | settings)


def prepare(blend, output_dir, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan and the manifest."""
    return prepare_here("rl", blend, output_dir, **CHOSEN | settings)


def build(planned, shards):
    """Build some of the planned shards, one after the other, in this process."""
    return build_shards("rl", planned, shards)


def lines_of(path):
    """The lines of a published file as they are, of zstd as well; only `\\n` ends one."""
    content = Path(path).read_bytes()
    if str(path).endswith(".zst"):
        content = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(content)
    *lines, rest = content.split(b"\n")
    assert rest == b""
    return lines

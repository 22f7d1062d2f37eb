"""Verification of an RL shard beyond sizes and hashes: every line must be a JSON object, and the document map must count them."""

from typing import BinaryIO, cast

import orjson
import pyarrow as pa
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.json_lines import split_lines
from tokenmill.tasks.sources.opening import BLOCK_BYTES
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.document_map import map_problems

from .shard import ENDINGS


def inspect_rl_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the files of a shard: lines that are not JSON objects, and counts that differ from the receipt."""
    compression = receipt.identity["recipe"]["compression"]
    problems: list[str] = []
    for part, count in receipt.parts.items():
        place = store.path(receipt.key, f"{part}.{ENDINGS[compression]}")
        try:
            problems += [f"{place}: {problem}" for problem in _file(place, compression, count.documents)]
        except (pa.ArrowException, OSError) as error:
            problems.append(f"{place}: cannot be read: {error}")
    return [*problems, *map_problems(store, receipt)]


def _file(place: str, compression: str, documents: int) -> list[str]:
    system, path = filesystem(place)
    found = 0
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        content = stream if compression == "none" else pa.CompressedInputStream(stream, compression)
        for rows in split_lines(iter(lambda: content.read(BLOCK_BYTES), b"")):
            for row in rows:
                found += 1
                if not isinstance(row, bytes) or not _is_object(row):
                    return [f"line {found:,} is not a JSON object"]
    return [] if found == documents else [f"holds {found:,} lines, but its receipt says {documents:,}"]


def _is_object(row: bytes) -> bool:
    try:
        return isinstance(orjson.loads(row), dict)
    except orjson.JSONDecodeError:
        return False

"""Building a batch of shards in one worker: skip what is proven, build the rest, tell the scheduler after each.

This is the body of the mapped Prefect task of every preparation. It is idempotent: whoever runs it again, after a
retry, a lost worker or beside another run, only builds what has no valid receipt.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.tasks.storage import is_local

from .plan import PlannedShard, shard_from_record
from .publish import sweep
from .receipt import Receipt
from .store import Store

BuildShard = Callable[[PlannedShard, Store], Receipt]
Announce = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class ShardDone:
    """What a worker tells about one finished shard: enough for progress, no more than 300 bytes of JSON."""

    key: str
    source: str
    source_bytes: int
    documents: int
    tokens: int
    dropped: int
    seconds: float
    reused: bool


def build_batch(
    records: Iterable[Mapping[str, Any]], store: Store, build: BuildShard, announce: Announce, *, rebuild: bool
) -> list[ShardDone]:
    """Build the shards of a batch in order, announcing each, and return one small record for each."""
    done: list[ShardDone] = []
    for shard in map(shard_from_record, records):
        receipt = None if rebuild else store.receipt(shard.key)
        reused = receipt is not None
        if receipt is None:
            if is_local(store.place):
                sweep(store.folder(shard.key))
            receipt = build(shard, store)
        done.append(_done(shard, receipt, reused=reused))
        announce(asdict(done[-1]))
    return done


def _done(shard: PlannedShard, receipt: Receipt, *, reused: bool) -> ShardDone:
    return ShardDone(
        key=shard.key,
        source=f"{shard.part.file.uri}@{shard.part.start}",
        source_bytes=shard.part.size,
        documents=receipt.documents,
        tokens=receipt.tokens,
        dropped=sum(receipt.drops.values()),
        seconds=0.0 if reused else receipt.volatile["seconds"],
        reused=reused,
    )

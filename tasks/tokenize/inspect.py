"""What verification checks of a pretraining shard beyond sizes and hashes: that each pair really is a data set."""

from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store, read_bytes, size_of

from .binidx import BinIdxError, read_index


def inspect_pretrain_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the `.bin/.idx` pairs of a shard: format, bounds, and counts against the receipt."""
    return [problem for part, count in receipt.parts.items() for problem in _pair(store, receipt.key, part, count)]


def _pair(store: Store, key: str, part: str, recorded: PartCount) -> list[str]:
    place = store.path(key, f"{part}.idx")
    data, size = read_bytes(place), size_of(store.path(key, f"{part}.bin"))
    if data is None or size is None:
        return [f"{place}: the pair is incomplete"]
    try:
        index = read_index(data, size)
    except BinIdxError as error:
        return [f"{place}: {error}"]
    found = PartCount(index.documents, index.tokens)
    return [] if found == recorded else [f"{place}: holds {found}, its receipt says {recorded}"]

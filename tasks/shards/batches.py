"""Batches: what one Prefect task builds.

A Prefect task on Dask costs 75 to 98 ms, and a burst of 10,000 loses records in the server, so shards are grouped:
about a minute of work each, at least four per worker so that they end together, never more than 1,000. Bytes are
spread with the longest first, each to the lightest batch (LPT: at most 4/3 of the best possible finish).
"""

import heapq
import math
from collections.abc import Sequence

from .plan import PlannedShard

TARGET_BYTES = 6_000_000_000
"""A minute of one core at 100 MB/s."""

BATCHES_PER_WORKER = 4
MOST_BATCHES = 1_000


def batches(shards: Sequence[PlannedShard], workers: int) -> list[list[PlannedShard]]:
    """The shards in balanced batches, heaviest batch first; within a batch, in plan order."""
    if not shards:
        return []
    wanted = max(math.ceil(sum(shard.part.size for shard in shards) / TARGET_BYTES), workers * BATCHES_PER_WORKER)
    count = min(wanted, MOST_BATCHES, len(shards))
    heap = [(0, number) for number in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(shards)), key=lambda place: -shards[place].part.size):
        load, number = heapq.heappop(heap)
        members[number].append(place)
        heapq.heappush(heap, (load + shards[place].part.size, number))
    order = sorted(heap, key=lambda entry: (-entry[0], entry[1]))
    return [[shards[place] for place in sorted(members[number])] for _, number in order]

"""A selection in plain functions: `stage.py` wraps them for Prefect."""

from collections.abc import Mapping

from tasks.select.settings import SelectionRecipe
from tasks.select.shard import select_shard
from tasks.shards.plan import PlannedShard
from tasks.shards.receipt import Receipt
from tasks.shards.store import Store


def build_selection_shard(shard: PlannedShard, store: Store, scores: Mapping[str, str]) -> Receipt:
    """Build one planned shard in this process; `scores` are places by content."""
    return select_shard(shard, SelectionRecipe(**shard.identity["recipe"]), store, scores)

"""A selection in plain functions: `stage.py` wraps them for Prefect."""

from collections.abc import Mapping

from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store

from .settings import SelectionRecipe
from .shard import select_shard


def build_selection_shard(shard: PlannedShard, store: Store, scores: Mapping[str, str]) -> Receipt:
    """Build one planned shard in this process; `scores` are places by content."""
    return select_shard(shard, SelectionRecipe(**shard.identity["recipe"]), store, scores)

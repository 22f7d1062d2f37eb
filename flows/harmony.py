"""Harmony: chat data of many shapes becomes one strict format, without duplicates, ready to be scored.

plan ─► normalize shards ─► find duplicates ─► mark shards ─► select pools and candidates ─► publish ─► report
        (all of these mapped over one Dask cluster)
"""

from .preparation import preparation_flow

harmony_normalize = preparation_flow("harmony")

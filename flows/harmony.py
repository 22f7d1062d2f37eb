"""Harmony: chat data of many shapes becomes one strict format, without duplicates, ready to be scored.

plan ─► normalize-shards ─► dedup-sign, dedup-exact, … ─► mark-shards ─► select-rows ─► publish ─► report
        (all of these mapped over one Dask cluster)
"""

from .preparation import preparation_flow

harmony_normalize = preparation_flow("harmony")

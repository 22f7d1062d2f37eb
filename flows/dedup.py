"""Deduplication: a blend of text without duplicate documents, and without documents that overlap evaluations.

plan ─► dedup-sign, dedup-exact, … (rounds by partition, mapped over Dask) ─► apply-decisions ─► publish ─► report
"""

from .preparation import preparation_flow

deduplicate_blend = preparation_flow("dedup")

"""Deduplication: a blend of text without duplicate documents, and without documents that overlap evaluations.

plan ─► find duplicates (sign slices, then rounds by partition, mapped over Dask) ─► write kept documents ─► publish ─► report
"""

from .preparation import preparation_flow

deduplicate_blend = preparation_flow("dedup")

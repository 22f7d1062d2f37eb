"""Quality filters: a blend of text with only the documents that pass every rule.

plan ─► filter-documents (mapped over Dask) ─► publish ─► report
"""

from .preparation import preparation_flow

filter_blend = preparation_flow("filter")

"""SFT data: a blend of conversations becomes packed Parquet with exact loss masks.

plan (with the template's self-check) ─► pack shards (mapped over Dask) ─► publish ─► report
"""

from .preparation import preparation_flow

sft_data_prep = preparation_flow("sft")

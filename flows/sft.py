"""SFT data: a blend of conversations becomes packed Parquet with exact loss masks.

plan (with the template's self-check) ─► tokenize-conversations ─► pack-sequences ─► publish ─► report
                                         (both mapped over one Dask cluster)
"""

from .preparation import preparation_flow

sft_data_prep = preparation_flow("sft")

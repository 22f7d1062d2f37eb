"""Pretraining data: a blend of raw text becomes verified Megatron `.bin/.idx` files and a `blend.json`.

plan ─► tokenize-shards ─► join-prefixes ─► publish ─► report
        (both mapped over one Dask cluster)
"""

from .preparation import preparation_flow

pretrain_data_prep = preparation_flow("pretrain")

"""Pretraining data: a blend of raw text becomes verified Megatron `.bin/.idx` files and a `blend.json`.

plan ─► tokenize shards (mapped over Dask) ─► publish ─► report
"""

from .preparation import preparation_flow

pretrain_data_prep = preparation_flow("pretrain")

"""Sequences to packs: bins of `pack_size` tokens, as Parquet files that SFT trainers read directly.

slice of rows ─► conversations ─► tokens and masks ─► stored sequences
stored sequences of many shards ─► packs ─► Parquet ─► splits/train|valid|test
"""

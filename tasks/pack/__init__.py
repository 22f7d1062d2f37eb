"""Sequences to packs: bins of `pack_size` tokens, as the Parquet files that SFT trainers read as they are.

slice of rows ─► conversations ─► tokens and masks ─► spool ─► packs ─► Parquet ─► splits/train|valid|test
"""

"""Shards, the unit of work: identity, receipt, and the map over Dask that builds them.

    plan ─► pending shards ─► batches ─► build (one Dask task per batch) ─► receipts ─► publication ─► verify

A shard's key is the hash of its source content and of every choice that can change a byte of its output. Only its receipt,
written last, proves it. So a run can be killed at any time and repeated, runs can share a store, and a changed weight costs
nothing.
"""

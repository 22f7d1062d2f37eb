"""The unit of work: a shard, its identity, the proof that it is done, and the map over Dask that makes it.

    plan ─► pending shards ─► batches ─► build (one Dask task per batch) ─► receipts ─► publication ─► verify

A shard is named by what is in it: its key is the hash of its source content and of every choice that can change a
byte of its output. A receipt, written last, proves a shard; nothing else does. So a run can be killed anywhere and
repeated, two runs can share a store, and a changed weight costs nothing.
"""

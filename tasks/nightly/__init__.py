"""Keeping prepared data up to date: what changed since the last version of a blend, why, the next version, and what may go.

    BLENDS/<kind>/<name>.json + settings ─► compare ─► prepare OUTPUT/<kind>/<name>/<version>/ ─► latest.json ─► prune

A blend that did not change costs its listing (0.4 s for 10,000 local files): the last manifest says by content what it
was made from. One that did costs its new shards, because all versions of all blends share one store.
"""

"""Keep prepared data up to date: what changed since the last version of a blend, the next version, and what to remove.

    BLENDS/<kind>/<name>.json + settings ─► compare ─► prepare OUTPUT/<kind>/<name>/<version>/ ─► latest.json ─► prune

An unchanged blend costs only a listing (0.4 s for 10,000 local files), because the last manifest records the content of its
sources. A changed one costs its new shards, because all versions of all blends share one store.
"""

"""Keep prepared data up to date: compare a blend with its latest version, prepare the next, prune old ones.

    BLENDS/<kind>/<name>.json + settings ─► compare ─► prepare OUTPUT/<kind>/<name>/<version>/ ─► latest.json ─► prune

An unchanged blend costs only a listing (0.4 s for 10,000 local files), because the last manifest records the content of its
sources. A changed one costs only its new shards, because all versions of all blends share one store.
"""

"""The rooms of tokenmill: one folder per domain, each with one front door (`stage.py`) and plain functions behind it.

Rooms use each other only downwards: blend, sources, shards < tokenize < report < flows. Only a room's `stage.py`
imports Prefect, and only `tasks/shards` imports Dask, so that planning and verifying start at once.
"""

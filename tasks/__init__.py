"""The packages of tokenmill, one per domain: plain functions, and Prefect tasks in `stage.py`.

Packages import each other only downwards: blend, sources, shards < tokenize < report < flows. Only `stage.py` files and
flows import Prefect, and only `tasks/shards` imports Dask, so that other commands start at once.
"""

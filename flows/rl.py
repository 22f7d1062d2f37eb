"""RL data: a blend of rows becomes JSON Lines that NeMo-RL and NeMo-Gym read as they are.

plan (with the tables that placeholders refer to) ─► transform-shards (mapped over Dask) ─► publish ─► report
"""

from .preparation import preparation_flow

rl_data_prep = preparation_flow("rl")

"""Blends: datasets and weights, in one list (flat) or one list per split.

A flat blend is split by holding documents out; a per-split blend lists the datasets of each split. Weights do not
affect shards: they decide at publication how much each dataset contributes to training.
"""

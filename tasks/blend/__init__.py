"""What goes in: a blend names data sets and weights, in one list (flat) or one list per split.

A flat blend is split by holding documents out; a per-split blend says itself what each split is made of. Weights
never touch the shards: they only decide, at publication, what share of the training each data set gets.
"""

"""Where rows come from: files are discovered, cut into slices at fixed places, and read with every line accounted for.

    discover(data set) ─► SourceFile … ─► cut ─► Slice … ─► read ─► TextBatch … or RecordBatch …

A slice is the unit of work and of identity. Plain JSONL is cut at fixed byte offsets, Parquet at row groups, and
compressed text and JSON arrays are one slice each, so that one huge file spreads over all workers and an appended
file disturbs no other slice.
"""

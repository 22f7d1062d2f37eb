"""Source data: find files, cut them into slices, identify slices by content, and read rows with every row accounted for.

    discover(dataset) ─► SourceFile … ─► cut ─► Slice … ─► read ─► TextBatch … or RecordBatch …

A slice is the unit of work and of identity. Plain JSON Lines are cut at fixed byte offsets, Parquet between row groups;
compressed text and JSON arrays are one slice per file. So all workers share a huge file, and a file that grows keeps its
existing slices.
"""

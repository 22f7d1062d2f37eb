"""Blends of raw text in, training-ready token shards out. The flows are in `tokenmill.flows`, what they call in `tokenmill.tasks`."""

"""Heterogeneous chat data to strict Harmony text, the format that gpt-oss models are trained on.

    record ─► source ─► Harmony messages ─► text ─► parsed again, checked, and written as a row

The grammar is stricter than the reference implementation, which reads every accepted text as the same messages. Text
isn't repaired.
"""

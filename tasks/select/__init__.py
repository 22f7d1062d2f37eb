"""Select rows: pools by predicates on columns, and candidates to embed.

    rows → base filter → pools (predicates on columns) → candidates: one text per row to embed → report on collapse

Predicates are data, checked against the columns before any row is read. Pools use whole columns; only candidates parse Harmony
text.
"""

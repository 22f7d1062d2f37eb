"""The parts of a report (`parts`, `charts`), and its renderers: `terminal`, `markdown`, and `html` with `templates/`.

A report is plain data: paragraphs, lists, tables and charts. Only `html` and its templates know HTML, and only `markdown` knows
Markdown tables, so that names from data are made safe in one place.
"""

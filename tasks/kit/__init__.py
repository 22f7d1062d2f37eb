"""The parts of a report and their Markdown (`parts`, `charts`), and its other renderers: `terminal`, and `html` with `templates/`.

A report is plain data: paragraphs, lists, tables and charts. Only `html` and its templates know HTML, and only `parts` knows
Markdown tables, so that names from data are made safe in one place.
"""

"""Quality rules: keep the documents of a blend that pass them, byte for byte."""

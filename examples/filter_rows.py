"""Filter rows with your own Python: any iterable of dicts is a dataset."""

from collections.abc import Iterator

import tokenmill as tm

RAW = [
    {"text": "The miller opens the sluice at dawn.", "source": "book"},
    {"text": "CLICK HERE click here CLICK HERE", "source": "web"},
    {"text": "Rye bread keeps for weeks, and its crumb stays moist.", "source": "web"},
]


def wanted(row: dict) -> bool:
    """Whether a row is worth training on: your rule."""
    letters = [character for character in row["text"] if character.isalpha()]
    return sum(map(str.isupper, letters)) < 0.3 * len(letters)


def cleaned() -> Iterator[dict]:
    """Yield the rows to prepare; they are read once and needn't fit into memory."""
    for row in RAW:
        if wanted(row):
            yield {**row, "text": row["text"].strip()}


if __name__ == "__main__":
    record = tm.pretrain(cleaned(), "out", holdout={"valid": 0, "test": 0})["pretrain"]
    print(record["documents"], "documents,", record["tokens"], "tokens")
    print(tm.dataframe("out", "documents"))

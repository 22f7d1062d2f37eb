"""Prepare a blend from Python: two datasets, a filter on their fields, and a budget."""

import json
from pathlib import Path

import tokenmill as tm


def write_rows(path: str, rows: list[dict]) -> str:
    """Write rows as JSON Lines; return the path."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


if __name__ == "__main__":  # workers import the script
    mills = [
        {"text": f"Mill {number} grinds {number % 5} sacks a day.", "sacks": number % 5} for number in range(1_000)
    ]
    breads = [{"content": f"Bread {number} needs rye, salt and time."} for number in range(200)]
    blend = {
        "datasets": [
            {"name": "mills", "path": write_rows("mills.jsonl", mills), "weight": 3, "where": "sacks > 0"},
            {"name": "breads", "path": write_rows("breads.jsonl", breads), "weight": 1, "text_field": "content"},
        ]
    }
    record = tm.pretrain(blend, "out", shard_size="64MB")["pretrain"]
    print(f"{record['documents']:,} of {record['rows']:,} rows, {record['tokens']:,} tokens")
    print("dropped:", record["dropped"])
    print("give this to Megatron-LM: --per-split-data-args-path out/blend.json")

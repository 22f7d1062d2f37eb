"""What models made of rows, in words: the mean NLL of each data set, and how much was cut."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any


def score_lines(manifest: Mapping[str, Any]) -> list[str]:
    """A sentence per data set; none for other kinds of preparation."""
    if manifest["type"] not in {"nll", "embeddings"}:
        return []
    sums: dict[str, Counter[str]] = {}
    for entry in manifest["shards"]:
        counts = {"truncated": entry["truncated"], **entry.get("facts", {})}
        sums.setdefault(entry["dataset"], Counter()).update(counts)
    return [line for name, found in sums.items() for line in _lines(name, found)]


def _lines(name: str, found: Counter[str]) -> list[str]:
    lines: list[str] = []
    if tokens := found["completion_token_count"]:
        mean = found["nll_sum"] / tokens
        lines.append(f"{name}: NLL {mean:.4f} per token over {tokens:,} tokens, a perplexity of {_perplexity(mean)}")
    if found["truncated"]:
        lines.append(f"{name}: {found['truncated']:,} rows are longer than what was read of them")
    return lines


def _perplexity(mean: float) -> str:
    return f"{math.exp(mean):,.2f}" if mean < math.log(1e9) else "a billion and more"

"""What became of normalized rows, in words: duplicates that were marked, pools and candidates."""

from collections.abc import Iterator, Mapping
from typing import Any

MOST_POOLS = 8


def selection_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a summary; none for a preparation that selects nothing."""
    for outcome, count in manifest.get("dedup", {}).get("tally", {}).items():
        if outcome != "kept":
            yield f"{outcome.replace('_', ' ')}: {count:,} rows"
    selection = manifest.get("selection", {})
    pools = sorted(selection.get("pools", {}).items(), key=lambda pool: -pool[1]["rows"])
    filled = [f"{name} {pool['rows']:,}" for name, pool in pools if pool["rows"]]
    if filled:
        more = f" and {len(filled) - MOST_POOLS} more" if len(filled) > MOST_POOLS else ""
        yield f"pools: {', '.join(filled[:MOST_POOLS])}{more}"
    if "candidates" in selection:
        yield f"candidates to embed: {selection['candidates']:,}"
    for place, count in selection.get("without_score", {}).items():
        yield f"without a score of {place}: {count:,} rows"

"""Filters: documents per CPU second, and verdicts, beside datatrove's own filters.

Both judge the same 100,000 parts of real files in many languages, in one process each, by the default rules of Gopher, C4 and
FineWeb; datatrove's filters judge every document each. The peer splits the words of a document once for three of them, because it
remembers them. Reading the documents and imports are not counted.
"""

import json

from bench import child
from bench.bench import Bench
from bench.record import Measure

DOCUMENTS, LONGEST = 100_000, 1_000
TARGET = 20.0


def measure(bench: Bench) -> list[Measure]:
    """Speed, and the share of equal verdicts."""
    found = json.loads(child.python("bench.filter_worker", DOCUMENTS, LONGEST).stdout)
    judged, size = found["documents"], found["characters"]
    ours, theirs = found["cpu_seconds"]["ours"], found["cpu_seconds"]["datatrove"]
    title = f"filter, {judged:,} documents, {size / 1e6:.0f} million characters"
    shown = [f"{judged / seconds:,.0f} documents per CPU second" for seconds in (ours, theirs)]
    equal = found["equal"] / found["verdicts"]
    return [
        Measure(title, shown[0], f"{shown[1]} (datatrove)", theirs / ours, "x", TARGET, at_least=True, facts=found),
        Measure(
            f"{title}, equal verdicts", f"{found['equal']:,}", f"{found['verdicts']:,} (datatrove)", 100 * equal, "%", 100,
            at_least=True, facts=found,
        ),
    ]  # fmt: skip

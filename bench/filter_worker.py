"""The verdicts of tokenmill and of datatrove on the same documents, and the CPU seconds of both, as JSON.

    python -m bench.filter_worker DOCUMENTS LONGEST

Texts that C4 edits are compared as well.
"""

import json
import sys
import time
from collections import Counter
from itertools import pairwise

import pyarrow as pa
from tokenmill.tasks.filter.rules import judge
from tokenmill.tasks.filter.settings import C4Quality, FineWebQuality, GopherQuality, GopherRepetition

from tests.filter import texts
from tests.peers.datatrove_filters import FILTERS, peer, verdict

BATCH = 1000
FAMILIES = {
    "gopher_repetition": GopherRepetition(),
    "gopher_quality": GopherQuality(),
    "c4": C4Quality(),
    "fineweb": FineWebQuality(),
}


def main() -> None:
    """Judge as many documents."""
    documents = [text for text in texts.documents(*map(int, sys.argv[1:])) if text]
    bounds = list(pairwise([*range(0, len(documents), BATCH), len(documents)]))
    batches = [pa.array(documents[start:stop], pa.large_string()) for start, stop in bounds]
    started = time.process_time()
    for batch in batches:
        judge(batch, FAMILIES)
    ours = time.process_time() - started
    alone = {family: _alone(family, batches) for family in FAMILIES}
    peers = {family: peer(family) for family in FILTERS}
    theirs: dict[str, list[tuple[str, str]]] = {family: [] for family in FILTERS}
    started = time.process_time()
    for text in documents:
        for family, chosen in peers.items():
            theirs[family].append(verdict(chosen, text))
    seconds = {"ours": ours, "datatrove": time.process_time() - started}
    pairs = [(family, *pair) for family in FILTERS for pair in zip(alone[family], theirs[family], strict=True)]
    found = {
        "documents": len(documents),
        "characters": sum(map(len, documents)),
        "verdicts": len(pairs),
        "equal": sum(one == other for _, one, other in pairs),
        "cpu_seconds": seconds,
        "reasons": Counter(f"{family} {reason or 'kept'}" for family, (reason, _), _ in pairs),
        "differences": [(family, one[0], other[0]) for family, one, other in pairs if one != other][:20],
    }
    print(json.dumps(found))


def _alone(family: str, batches: list[pa.LargeStringArray]) -> list[tuple[str, str]]:
    settings = FAMILIES[family]
    if isinstance(settings, C4Quality):
        settings = settings.model_copy(update={"remove_lines": True})
    found: list[tuple[str, str]] = []
    for batch in batches:
        judged = judge(batch, {family: settings})
        found += zip(judged.reasons.tolist(), judged.texts.to_pylist(), strict=True)
    return found


if __name__ == "__main__":
    main()

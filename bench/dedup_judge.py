"""How right it was to drop what was dropped, and how much of what was planted was found; with sets of strings.

A planted pair of a similarity of 0.8 or more is found if not both of its documents stay. A drop is right if the document
is that much alike to any of those for which it went.

    python -m bench.dedup_judge DOCUMENTS PAIRS DROPPED COUNT

Of the first COUNT documents. Prints the number of planted pairs and of those found, apart for exact copies and near ones,
and the number of drops and of those that were right, as JSON.
"""

import json
import sys
from itertools import islice
from pathlib import Path

import orjson

from bench.dedup_corpus import THRESHOLD, similarity


def main() -> None:
    """Judge the drops, with the arguments of the module's docstring."""
    documents, pairs, dropped, count = sys.argv[1:]
    with Path(dropped).open("rb") as lines:
        drops: dict[int, list[int]] = dict(map(orjson.loads, lines))
    planted = [pair for pair in orjson.loads(Path(pairs).read_bytes()) if pair[1] < int(count)]
    found = {
        name: [original in drops or copy in drops for original, copy, alike in planted if low <= alike < high]
        for name, low, high in (("exact", 1, 2), ("near", THRESHOLD, 1))
    }
    texts = _texts(documents, {*drops, *(number for kept in drops.values() for number in kept)})
    right = [
        any(similarity(texts[number], texts[other]) >= THRESHOLD for other in kept) for number, kept in drops.items()
    ]
    print(
        json.dumps(
            {
                **{name: {"pairs": len(each), "found": sum(each)} for name, each in found.items()},
                "traps": sum(alike < THRESHOLD for _, _, alike in planted),
                "dropped": len(right),
                "right": sum(right),
            }
        )
    )


def _texts(documents: str, wanted: set[int]) -> dict[int, str]:
    with Path(documents).open("rb") as lines:
        numbered = enumerate(islice(lines, max(wanted, default=-1) + 1))
        return {number: orjson.loads(line)["text"] for number, line in numbered if number in wanted}


if __name__ == "__main__":
    main()

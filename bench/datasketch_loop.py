"""Near-duplicates with `datasketch`, as its users look for them: a document at a time, asked for, then inserted.

Each text becomes the set of its runs of five words, those a MinHash of 128 permutations (by `update_batch`, a third of
the time of `update` for one run after the other), and whatever the index for a similarity of 0.8 finds makes the document
a duplicate. Nothing is verified. One process, all in memory.

    python -m bench.datasketch_loop SOURCE DOCUMENTS DROPPED

Reads the first DOCUMENTS lines. Writes a line of JSON for each document that goes to DROPPED: its number, and the numbers
that it was found to be like. Prints what it cost, imports left out, as JSON.
"""

import json
import resource
import sys
import time
from itertools import islice
from pathlib import Path

from datasketch import MinHash, MinHashLSH

WORDS = 5
PERMUTATIONS = 128
THRESHOLD = 0.8


def sketch(text):
    """The MinHash of a text."""
    words = text.split()
    shingles = {" ".join(words[start : start + WORDS]) for start in range(max(len(words) - WORDS + 1, 1))}
    minhash = MinHash(num_perm=PERMUTATIONS)
    minhash.update_batch([shingle.encode("utf-8") for shingle in shingles])
    return minhash


def main():
    """Look for near-duplicates in the beginning of one file."""
    source, documents, dropped = sys.argv[1:]
    started, cpu = time.perf_counter(), time.process_time()
    index = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
    gone = []
    with Path(source).open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, int(documents))):
            minhash = sketch(json.loads(line)["text"])
            alike = index.query(minhash)
            if alike:
                gone.append((number, alike))
            else:
                index.insert(number, minhash)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bands": index.b,
        "rows": index.r,
    }
    with Path(dropped).open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(each) + "\n" for each in gone)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

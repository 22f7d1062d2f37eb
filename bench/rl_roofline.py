"""The least that has to be done to rows that are changed: orjson reads every line and writes it again, and no more.

    python -m bench.rl_roofline SOURCE

The lines are in memory, and nothing is kept. Prints the CPU seconds as JSON.
"""

import json
import sys
import time
from pathlib import Path

import orjson


def main() -> None:
    """Parse and serialize the rows of one source."""
    lines = Path(sys.argv[1]).read_bytes().splitlines()
    started = time.process_time()
    for line in lines:
        orjson.dumps(orjson.loads(line))
    print(json.dumps({"cpu_seconds": time.process_time() - started}))


if __name__ == "__main__":
    main()

"""Torture tokenmill: `python -m bench.torture [NAME …] [--seed N] [--count N]`, everything by default (more than an hour).

Each torture runs `--count` random cases, or its own number of them, and prints what it did in one line. All cases follow
from the seed, which is printed first, so that whatever fails can be repeated. The exit code is 1 where something did not hold.
"""

import argparse
import random
import sys
import time
import traceback
from types import ModuleType

from bench.torture import flips, formats, ids, kernels, kills, parquet, programs, rows, store

TORTURES: dict[str, ModuleType] = {
    "rows": rows, "parquet": parquet, "flips": flips, "kills": kills, "ids": ids, "formats": formats,
    "programs": programs, "store": store, "kernels": kernels,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the named tortures; the exit code."""
    parser = argparse.ArgumentParser("python -m bench.torture")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TORTURES))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--count", type=int, help="cases of each torture")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in TORTURES]:
        parser.error(f"unknown torture: {', '.join(unknown)}; known: {', '.join(TORTURES)}")
    print(f"seed {given.seed}", flush=True)
    held = [_holds(name, given.count or TORTURES[name].COUNT, given.seed) for name in given.names or TORTURES]
    return 0 if all(held) else 1


def _holds(name: str, count: int, seed: int) -> bool:
    begun = time.monotonic()
    try:
        print(f"{name}: {TORTURES[name].run(count, seed)} ({time.monotonic() - begun:,.0f} s)", flush=True)
    except AssertionError:
        traceback.print_exc()
        print(f"{name}: DOES NOT HOLD with seed {seed}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

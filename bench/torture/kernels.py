"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in the tests that compare them with references.

These tests give random texts, rows and sets to kernels that are compiled for this alone. A read or write outside of a buffer ends
the process. Python's own allocator is switched off, because it would hide the ends of small buffers. Each case has other examples
and takes two minutes. Needs gcc with libasan.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenmill.tasks import runtime

COUNT = 5

ROOT = Path(__file__).parents[2]
SOURCES = tuple(ROOT.glob("tasks/*/kernel.c"))
TESTS = (
    "tests/filter/test_verdicts.py", "tests/dedup/test_kernel.py", "tests/dedup/test_shingles.py", "tests/dedup/test_near.py",
    "tests/sources/test_exact_json.py",
)  # fmt: skip

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-shared", "-fPIC")
OPTIONS = "detect_leaks=0:detect_odr_violation=0"
"""Python leaks at its end."""

FOLDER = "SANITIZED_KERNELS"
"""The variable of the environment that names the folder of the compiled kernels."""


def run(count: int, seed: int) -> str:
    """Run the tests `count` times. Raises AssertionError with the end of their output."""
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            subprocess.run(["gcc", *FLAGS, source, "-o", _sanitized(folder, source)], check=True)
        for case in range(count):
            _test(folder, seed + case)
    return f"{count:,} runs of {len(TESTS)} files of tests found no fault in the memory of {len(SOURCES)} kernels"


def _test(folder: str, seed: int) -> None:
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    own = {"LD_PRELOAD": library.strip(), "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": OPTIONS, FOLDER: folder}
    options = ["-q", "-p", __name__, "-p", "no:cacheprovider", "--capture=sys", f"--hypothesis-seed={seed}"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"seed {seed}:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")


def _sanitized(folder: str, source: Path) -> str:
    return f"{folder}/{source.parent.name}.so"


def pytest_configure() -> None:
    """As a plugin of the tests: load the kernels of the folder instead."""
    runtime.load = lambda module: ctypes.CDLL(_sanitized(os.environ[FOLDER], Path(module)))


def pytest_sessionfinish() -> None:
    """Raises AssertionError if the tests have not used them."""
    mapped = Path("/proc/self/maps").read_text("utf-8")
    assert all(_sanitized(os.environ[FOLDER], source) in mapped for source in SOURCES)

"""Load the C functions of a package, which `pip` compiles. They are plain C called with ctypes: other threads run meanwhile."""

import ctypes
from pathlib import Path

from tokenmill.tasks.errors import RunError


def load(module: str) -> ctypes.CDLL:
    """Return the functions of `kernel.c` beside a Python file. Raises RunError if they cannot be loaded."""
    file = Path(module).with_name("compiled.abi3.so")
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise RunError(f"{file}: cannot be loaded ({error}); install tokenmill again, with a C compiler") from error

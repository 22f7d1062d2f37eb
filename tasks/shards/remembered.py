"""A cache of small answers that take time to compute, each sealed in a file named after its question.

An answer can decide which ids a text gets, so a damaged, edited or unreadable one is computed again and replaced. Losing an
answer costs only time.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import TypeAdapter
from tokenmill.tasks.seal import sealed, unsealed

from .publish import publish_bytes
from .store import read_bytes

Answer = TypeVar("Answer")


def remembered(place: str, shape: type[Answer], find: Callable[[], Answer]) -> Answer:
    """The result of `find()`, cached at `place`; `shape` is its type, which JSON must be able to hold.

    Where nothing can be written, it is computed every time.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(shape)
    with suppress(OSError, ValueError, KeyError):
        return adapter.validate_python(unsealed(read_bytes(place) or b"")["answer"])
    found = find()
    with suppress(OSError):
        publish_bytes(place, sealed({"answer": adapter.dump_python(found, mode="json"), "volatile": {}}))
    return found

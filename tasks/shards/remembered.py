"""Answers that are kept because they take time to find: small, sealed, each at a place named after its question.

What is kept decides which ids a text gets, so it is believed whole or not at all: an answer that was damaged or edited,
has another shape, or cannot be read is found again and replaced. Losing one costs time and nothing else.
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
    """What `find()` says, kept at `place`; `shape` is its type, which JSON can hold.

    Where nothing can be written, it is found every time.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(shape)
    with suppress(OSError, ValueError, KeyError):
        return adapter.validate_python(unsealed(read_bytes(place) or b"")["answer"])
    found = find()
    with suppress(OSError):
        publish_bytes(place, sealed({"answer": adapter.dump_python(found, mode="json"), "volatile": {}}))
    return found

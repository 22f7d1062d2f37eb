"""A cache of small results that take time to compute, each in a sealed file.

A result can decide which ids a text gets, so a damaged, edited or unreadable one is computed again and replaced. Losing a
result costs only time.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import TypeAdapter
from tokenmill.tasks.seal import sealed, unsealed

from .publish import publish_bytes
from .store import read_bytes

Result = TypeVar("Result")


def remembered(place: str, kind: type[Result], compute: Callable[[], Result]) -> Result:
    """The result of `compute()`, cached at `place`; `kind` is its type, which must have a JSON form.

    If `place` cannot be written, the result is computed every time.
    """
    found = recalled(place, kind)
    if found is not None:
        return found
    result = compute()
    with suppress(OSError):
        answer = TypeAdapter[Any](kind).dump_python(result, mode="json")
        publish_bytes(place, sealed({"answer": answer, "volatile": {}}))
    return result


def recalled(place: str, kind: type[Result]) -> Result | None:
    """The result that is cached at `place`, or None."""
    with suppress(OSError, ValueError, KeyError):
        return TypeAdapter[Any](kind).validate_python(unsealed(read_bytes(place) or b"")["answer"])
    return None

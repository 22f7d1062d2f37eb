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
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    with suppress(OSError, ValueError, KeyError):
        return adapter.validate_python(unsealed(read_bytes(place) or b"")["answer"])
    result = compute()
    with suppress(OSError):
        publish_bytes(place, sealed({"answer": adapter.dump_python(result, mode="json"), "volatile": {}}))
    return result

"""Blends of raw text in, training-ready token shards out.

From Python, a kind of preparation is a function, named as in its manifest:

    from tokenmill import pretrain

    record = pretrain("blends/tiny.json", "output/pretrain", shard_size="64MB")

It takes a blend (a path, a URI, or the JSON itself as a dict) or an iterable of rows, and returns the artifact record.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., dict[str, Any]]:
    """The function of a kind of preparation; what it needs is imported when it is asked for."""
    if name.startswith("_"):
        raise AttributeError(name)
    from tokenmill.tasks.shards.kinds import KINDS

    if name not in KINDS:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    from tokenmill.flows.terminal import be_quiet

    be_quiet()  # before Prefect is imported and reads its settings
    from tokenmill.flows.from_python import function_of

    return function_of(name)

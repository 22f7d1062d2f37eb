"""The one layer of retries: a batch whose storage or network failed is tried again, after 2, 4 and 8 s on average.

Neither Prefect nor Dask retries a batch that failed, because two layers would multiply their attempts. A request to S3 or the Hub
has its own attempts below this layer, in its client. A batch that is tried again redoes only the shards without a receipt.
"""

import random
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = (2.0, 4.0, 8.0)
"""Average waits before a batch is tried again."""

PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_transient(error: object) -> bool:
    """Return whether to retry after an error: storage and network errors may pass, others do not."""
    return isinstance(error, OSError) and not isinstance(error, PERMANENT)


def with_retries(work: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
    """Return the result of a call that is tried again after transient errors."""
    for seconds in RETRY_SECONDS:
        try:
            return work(*arguments, **keywords)
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311 - so that workers do not try again all at once
    return work(*arguments, **keywords)


def retrying(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `with_retries`."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        return with_retries(function, *arguments, **keywords)

    return call

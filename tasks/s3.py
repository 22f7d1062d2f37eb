"""s3fs with retries in one layer, and with OSErrors that name the object.

s3fs retries what botocore has already retried: a store that answers 503 SlowDown gets 25 requests instead of 5, and one that
drops connections gets 50, just when it needs fewer. Here only botocore retries requests, with exponential back-off and jitter:
5 attempts in about 8 s, or as set by AWS_MAX_ATTEMPTS and AWS_RETRY_MODE (`adaptive` slows down in advance). botocore does not
see a response that breaks off while it is read; s3fs requests it again, at most 5 times in total.

Remaining failures become OSErrors, which are retried per batch (`shards/retry.py`); botocore's own errors are not OSErrors.

`S3.join` concatenates ranges of objects without moving their bytes through this machine, by `UploadPartCopy`. S3 accepts parts of
5 MiB to 5 GiB, at most 10,000 of them; only the last may be smaller. So ranges below 5 MiB are gathered here, with the beginning
of the range that follows, and uploaded: at most 10 MiB of traffic for each run of small ranges.
"""

import asyncio
import errno
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import ClientError as BrokenResponseError
from aiohttp import ClientPayloadError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
)
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error
from tokenmill.tasks.errors import InputError

SMALLEST_PART, LARGEST_PART = 5 << 20, 5 << 30
MOST_PARTS = 9_000
COPIES = 16
"""Parts that are copied at a time."""


NAMED = {"AWS_PROFILE": "profile", "AWS_ENDPOINT_URL": "endpoint", "AWS_DEFAULT_REGION": "region"}
"""Variables by a word of botocore's errors."""


class Range(NamedTuple):
    """`size` bytes of the object at `path` (without scheme), from byte `start`."""

    path: str
    start: int
    size: int


def parts_of(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Yield the parts to concatenate `ranges` from: one range of 5 MiB to 5 GiB that S3 can copy, or several that are gathered."""
    smallest = max(SMALLEST_PART, -(-sum(each.size for each in ranges) // MOST_PARTS))
    gathered: list[Range] = []
    for path, start, size in ranges:
        taken = min(size, smallest - sum(each.size for each in gathered)) if gathered else 0
        if taken:
            gathered.append(Range(path, start, taken))
        if gathered and sum(each.size for each in gathered) == smallest:
            yield gathered
            gathered = []
        rest = Range(path, start + taken, size - taken)
        if rest.size >= smallest:
            # A copy takes at most 5 GiB; equal ranges leave none that is too small.
            count = -(-rest.size // LARGEST_PART)
            bounds = [rest.size * number // count for number in range(count + 1)]
            yield from ([Range(path, rest.start + first, last - first)] for first, last in itertools.pairwise(bounds))
        elif rest.size:
            gathered.append(rest)
    if gathered:
        yield gathered


class TornResponseError(OSError, ClientPayloadError):
    """A response that broke off. s3fs retries it because of the second base class."""


class Body:
    """aiobotocore's body of a response; its read errors name the object."""

    def __init__(self, body: Any, place: str) -> None:  # noqa: ANN401 - a proxy
        self._body, self._place = body, place

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as above
        return getattr(self._body, name)

    async def read(self, *size: int) -> bytes:
        """Return the rest of the body, or its next `size` bytes. Raises TornResponseError."""
        try:
            return await self._body.read(*size)
        except ClientPayloadError as error:
            raise TornResponseError(errno.EIO, f"{type(error).__name__}: {error}", self._place) from error


EXPIRED = frozenset({
    "400", "403", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed",
    "SignatureDoesNotMatch", "TokenRefreshRequired",
})  # fmt: skip
"""Codes of expired or wrong credentials; answers to HEAD lack a body, so their code is the status."""


class S3(S3FileSystem):
    """The file system of s3:// URLs."""

    async def set_session(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in s3fs
        """Connect. Raises InputError for an environment that botocore cannot use."""
        try:
            return await super().set_session(*args, **kwargs)
        except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint without http://
            named = next((name for name, word in NAMED.items() if word in str(error)), "AWS_…")
            raise InputError(f"{named}: {error}; correct it in the environment or in ~/.aws, or unset it") from error

    async def _call_s3(self, method: str, *akwarglist: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ANN401 - as in s3fs
        """Send one request. Raises OSError with the object as its `filename`."""
        await self.set_session()
        call = getattr(await self.get_s3(kwargs.get("Bucket")), method)
        place = "/".join(["s3:/", *(kwargs[part] for part in ("Bucket", "Prefix", "Key") if part in kwargs)])
        try:
            response = await call(**self._get_s3_method_kwargs(call, *akwarglist, **kwargs))
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in EXPIRED:
                message = f"{error}; the credentials may have expired or be wrong: renew them, then run the same command again"
                raise PermissionError(errno.EACCES, message, place) from error
            refusal = translate_boto_error(error)
            if refusal.errno is not None:
                refusal.filename = place
            raise refusal from error
        except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
            message = f"{error}; put AWS credentials into the environment or into ~/.aws"
            raise PermissionError(errno.EACCES, message, place) from error
        except (BotoCoreError, BrokenResponseError) as error:
            torn = isinstance(error, ClientPayloadError)  # which s3fs asks for again
            raise (TornResponseError if torn else OSError)(
                errno.EIO, f"{type(error).__name__}: {error}", place
            ) from error
        if "Body" in response:
            response["Body"] = Body(response["Body"], place)
        return response

    call_s3 = sync_wrapper(_call_s3)

    async def _cat_file(self, path: str, *args: Any, max_concurrency: int = 1, **kwargs: Any) -> bytes:  # noqa: ANN401 - as in s3fs
        """The content of an object, by default in one request: for a concurrent read, s3fs asks for the size first."""
        return await super()._cat_file(path, *args, max_concurrency=max_concurrency, **kwargs)

    async def _join(self, ranges: Sequence[tuple[str, int, int]], path: str) -> None:
        """Concatenate ranges `(path, start, size)` of objects into the object at `path`, atomically. Raises OSError; then the object is unchanged."""
        bucket, key, _ = self.split_path(path)
        upload = await self._call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        place = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"]}
        slots = asyncio.Semaphore(COPIES)

        async def put(number: int, part: list[Range]) -> dict[str, Any]:
            async with slots:
                where = {**place, "PartNumber": number}
                if len(part) == 1:
                    (source,) = part
                    span = f"bytes={source.start}-{source.start + source.size - 1}"
                    copied = await self._call_s3(
                        "upload_part_copy", **where, CopySource=source.path, CopySourceRange=span
                    )
                    return {"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]}
                pieces = [await self._cat_file(path, start=start, end=start + size) for path, start, size in part]
                uploaded = await self._call_s3("upload_part", **where, Body=b"".join(pieces))
                return {"PartNumber": number, "ETag": uploaded["ETag"]}

        try:
            parts = await asyncio.gather(
                *(put(number, part) for number, part in enumerate(parts_of([Range(*each) for each in ranges]), 1))
            )
            await self._call_s3("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except BaseException:
            with suppress(OSError):  # the caller must get the first error; readers do not see a pending upload
                await self._call_s3("abort_multipart_upload", **place)
            raise
        self.invalidate_cache(path)

    join = sync_wrapper(_join)

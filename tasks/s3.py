"""s3fs with retries in one layer, and with OSErrors that name the object.

s3fs retries what botocore has already retried: a store that answers 503 SlowDown gets 25 requests instead of 5, and one that
drops connections gets 50, just when it needs fewer. Here botocore alone retries requests, with exponential back-off and jitter:
5 attempts in some 8 s, or as set by AWS_MAX_ATTEMPTS and AWS_RETRY_MODE (`adaptive` slows down in advance). botocore does not
see a response that breaks off while it is read; s3fs requests it again, at most 5 times in total.

Remaining failures become OSErrors, which the caller retries per batch; botocore's own errors are not OSErrors.
"""

import errno
from typing import Any

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


class TornResponseError(OSError, ClientPayloadError):
    """A response that broke off. s3fs retries it because of the second base class."""


class Body:
    """aiobotocore's body of a response; its read errors name the object."""

    def __init__(self, body: Any, place: str) -> None:  # noqa: ANN401 - a proxy
        self._body, self._place = body, place

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as above
        return getattr(self._body, name)

    async def read(self, *size: int) -> bytes:
        """The rest of the body, or its next `size` bytes. Raises TornResponseError."""
        try:
            return await self._body.read(*size)
        except ClientPayloadError as error:
            raise TornResponseError(errno.EIO, f"{type(error).__name__}: {error}", self._place) from error


class S3(S3FileSystem):
    """The file system of s3:// URLs."""

    async def _call_s3(self, method: str, *akwarglist: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ANN401 - as in s3fs
        """Send one request. Raises OSError with the object as its `filename`."""
        await self.set_session()
        call = getattr(await self.get_s3(kwargs.get("Bucket")), method)
        place = "/".join(["s3:/", *(kwargs[part] for part in ("Bucket", "Prefix", "Key") if part in kwargs)])
        try:
            response = await call(**self._get_s3_method_kwargs(call, *akwarglist, **kwargs))
        except ClientError as error:
            refusal = translate_boto_error(error)
            if refusal.errno is not None:
                refusal.filename = place
            raise refusal from error
        except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
            message = f"{error}; put AWS credentials into the environment or into ~/.aws"
            raise PermissionError(errno.EACCES, message, place) from error
        except (BotoCoreError, BrokenResponseError) as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", place) from error
        if "Body" in response:
            response["Body"] = Body(response["Body"], place)
        return response

    call_s3 = sync_wrapper(_call_s3)

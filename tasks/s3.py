"""S3 as s3fs has it, with every failed request tried again in one place, and told in one way.

s3fs repeats what botocore has repeated already: a store that answers 503 SlowDown gets 25 requests instead of 5, and one
that hangs up 50, just when it asks for fewer. Here a request is left to botocore alone, which waits longer each time, by
chance: 5 attempts and some 8 s, or whatever AWS_MAX_ATTEMPTS and AWS_RETRY_MODE say (`adaptive` slows a worker down
before it is told to). What botocore cannot see, an answer that breaks off while it is read, s3fs asks for again, 5 times in all.

What is left is an OSError with the name of the object: a connection that is lost is worth another try of the whole batch
as much as a disk is, and botocore's own errors are none.
"""

import errno
from typing import Any

from aiohttp import ClientError as BrokenAnswerError
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


class TornAnswerError(OSError, ClientPayloadError):
    """An answer that broke off: by its second parent s3fs knows that it may ask again."""


class Body:
    """The body of an answer as aiobotocore has it, read with errors that name the object."""

    def __init__(self, body: Any, place: str) -> None:  # noqa: ANN401 - a proxy
        self._body, self._place = body, place

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it has
        return getattr(self._body, name)

    async def read(self, *size: int) -> bytes:
        """What is left, or the next `size` bytes of it. Raises TornAnswerError."""
        try:
            return await self._body.read(*size)
        except ClientPayloadError as error:
            raise TornAnswerError(errno.EIO, f"{type(error).__name__}: {error}", self._place) from error


class S3(S3FileSystem):
    """The file system of s3:// URLs."""

    async def _call_s3(self, method: str, *akwarglist: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ANN401 - as in s3fs
        """One request. Raises OSError with the object as its `filename`, or as the store's refusal translates to."""
        await self.set_session()
        call = getattr(await self.get_s3(kwargs.get("Bucket")), method)
        place = "/".join(["s3:/", *(kwargs[part] for part in ("Bucket", "Prefix", "Key") if part in kwargs)])
        try:
            answer = await call(**self._get_s3_method_kwargs(call, *akwarglist, **kwargs))
        except ClientError as error:
            refusal = translate_boto_error(error)
            if refusal.errno is not None:
                refusal.filename = place
            raise refusal from error
        except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
            said = f"{error}; put credentials of AWS into the environment, or into ~/.aws"
            raise PermissionError(errno.EACCES, said, place) from error
        except (BotoCoreError, BrokenAnswerError) as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", place) from error
        if "Body" in answer:
            answer["Body"] = Body(answer["Body"], place)
        return answer

    call_s3 = sync_wrapper(_call_s3)

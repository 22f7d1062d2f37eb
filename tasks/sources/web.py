"""Files on web servers: `https://host/path/rows.jsonl.gz?download=true`.

Web servers don't list files, so a source is one file. A request for its first byte gives the size and the version (ETag, or the
time of the last change); later reads must have that version. A server without ranges sends the whole file each time, so
a stream asks it once, and reads files up to MAX_WHOLE_BYTES bytes long this way.
"""

import re
from email.message import Message
from functools import cache
from typing import cast
from urllib.parse import unquote, urlsplit

from fsspec.spec import AbstractBufferedFile
from httpx2 import Client, HTTPError, InvalidURL, Response, Timeout, TransportError
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status
from tokenmill.tasks.errors import InputError, RunError

from .files import SourceFile
from .hub_client import AGAIN, PASSING, TIMEOUT, patiently
from .integrity import changed

MAX_WHOLE_BYTES = 64 << 20

CONNECT_SECONDS = 5.0

NOT_THERE, PARTIAL, NO_SUCH_RANGE = frozenset({404, 410}), 206, 416
REFUSED = frozenset({401, 403})

DOWNLOAD = "download it (curl -LO), and name the file"


def offered(url: str) -> tuple[list[str], int, str | None]:
    """Return the file at a URL as its server describes it: its names (in the URL, in the address that this leads to, and a proposed
    one), size and version. Raises InputError if there is none that can be read, and RunError if the server fails for long.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise InputError(f"{parts.scheme}://…@{parts.hostname}{parts.path}: holds a name or a password; {DOWNLOAD}")
    if not parts.hostname or parts.path in {"", "/"} or re.search(r"[*\[\]{}]", parts.path):
        raise InputError(
            f"{url}: is a folder or a pattern, and web servers list no files; name each file, or {DOWNLOAD}"
        )
    try:
        response, _ = patiently(lambda: _asked(url, "0-0", with_content=False))
    except (HfHubHTTPError, HTTPError, InvalidURL, UnicodeError) as error:
        raise _failure(url, error) from error
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise InputError(
            f"{url}: is a web page, not a file; name the address behind its download button, or {DOWNLOAD}"
        )
    # A server without ranges sends the whole file for every read.
    size = _size(response)
    if size is None or (response.status_code != PARTIAL and size > MAX_WHOLE_BYTES):
        lacking = "its size" if size is None else f"parts of its {size:,} bytes"
        raise InputError(f"{url}: the server does not give {lacking}; {DOWNLOAD}")
    proposed = Message()  # parses what a header of mail may have, encoded names included
    proposed["Content-Disposition"] = response.headers.get("Content-Disposition", "")
    places = [urlsplit(each).path.rpartition("/")[2] for each in (url, str(response.url))]
    return [*map(unquote, places), proposed.get_filename("")], size, _version(url, response)


class WebStream(AbstractBufferedFile):
    """A file of a web server, read in ranges. Raises RunError when it has changed or the server fails for long."""

    def __init__(self, file: SourceFile, block_size: int, cache: str) -> None:
        self._version, self._whole = file.version, b""
        super().__init__(None, file.uri, "rb", cast("str", block_size), cache_type=cache, size=file.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        if self._whole:
            return self._whole[start:end]
        try:
            response, content = patiently(
                lambda: _asked(self.path, f"{start}-{end - 1}", with_content=True), TransportError
            )
        except (HfHubHTTPError, HTTPError) as error:
            raise RunError(str(_failure(self.path, error))) from error
        if _version(self.path, response) != self._version or _size(response) not in {self.size, None}:
            raise changed(self.path)
        if response.status_code != PARTIAL:  # the server doesn't know ranges, and sent the whole file
            self._whole = content
            content = content[start:end]
        if len(content) != end - start:
            raise RunError(f"{self.path}: {len(content):,} bytes arrived instead of {end - start:,}; {AGAIN}")
        return content


@cache
def _client() -> Client:
    return Client(follow_redirects=True, timeout=Timeout(TIMEOUT, connect=CONNECT_SECONDS))


def _asked(url: str, part: str, *, with_content: bool) -> tuple[Response, bytes]:
    """The answer to a request for bytes of a file, and its content as it is stored."""
    headers = {"Range": f"bytes={part}", "Accept-Encoding": "identity"}  # a range of packed bytes would be useless
    with _client().stream("GET", url, headers=headers) as response:
        if response.is_error and response.status_code != NO_SUCH_RANGE:
            response.read()
            hf_raise_for_status(response)
        return response, b"".join(response.iter_raw()) if with_content else b""


def _size(response: Response) -> int | None:
    """Return the number of bytes of the whole file; None if the server doesn't send it."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if not total and "Content-Encoding" not in response.headers:
        total = response.headers.get("Content-Length", "")
    return int(total) if total.isdigit() else None


def _version(url: str, response: Response) -> str | None:
    """An ETag is unique among the versions of one address only."""
    found = response.headers.get("ETag") or response.headers.get("Last-Modified")
    return f"{found} {url}" if found else None


def _failure(url: str, error: Exception) -> InputError | RunError:
    if not isinstance(error, HfHubHTTPError):
        return InputError(f"{url}: cannot be reached ({error}); check the address and the network, then {AGAIN}")
    status = error.response.status_code
    if status in NOT_THERE:
        return InputError(f"{url}: file not found ({status}); check the address")
    if status in REFUSED:
        return InputError(f"{url}: access denied ({status}); a signed address may have expired: get a new one")
    if status in PASSING:
        return RunError(f"{url}: the server fails ({status}); {AGAIN}")
    return InputError(f"{url}: the server answers {status}; check the address, or {DOWNLOAD}")

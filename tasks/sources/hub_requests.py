"""Requests to the Hugging Face hub: patient ones, and a file of a dataset as a stream, in as few requests as there can be.

The hub limits requests per account, and discovery already knows the size and commit of every file. So no worker lists
anything: a read is one range request. For a large file, the hub answers with the place where it is stored, signed for some
time; later reads of any stream in this process go there directly, and the hub is asked again only when that place refuses.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast
from urllib.parse import urlsplit

from fsspec.spec import AbstractBufferedFile
from httpx2 import Response, TransportError
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, parse_ratelimit_headers
from tokenmill.tasks.errors import RunError

from .files import MAX_PLACES, PLACES, SourceFile

WAITS = (1, 2, 4, 8)
"""Seconds before the Hub is asked again, unless it asks for a different wait."""

MAX_WAIT = 300
"""Seconds to wait in all. The hub counts requests per five minutes."""

TOO_MANY = 429
PASSING = frozenset({TOO_MANY, 500, 502, 503, 504})

EXPIRED = frozenset({400, 401, 403, 404, 410})
"""What stores answer to an address whose signature has expired."""

TIMEOUT = 60
"""Seconds without a byte, after which a part of a file is asked for again."""

LOGGER = logging.getLogger(__name__)

AGAIN = "run the same command again"

Answer = TypeVar("Answer")


def endpoint() -> str:
    """The address of the hub. Its client reads HF_ENDPOINT only when it is imported."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def patiently(
    ask: Callable[[], Answer],
    passing: type[Exception] | tuple[type[Exception], ...] = (),
    waits: Sequence[float] = WAITS,
) -> Answer:
    """The answer of the hub, which is asked again, when it says, if it has had too many requests or failed.

    `passing` are more errors after which it is asked again, `waits` the seconds before that. The last error is raised, as soon as
    the hub asks for more than MAX_WAIT in all. A long wait is logged.
    """
    left = MAX_WAIT
    for usual in waits:
        try:
            return ask()
        except HfHubHTTPError as error:
            wait = seconds_to_wait(error.response, usual)
            if error.response.status_code not in PASSING or wait > left:
                raise
        except passing:
            wait = usual
        if wait > WAITS[-1]:
            LOGGER.warning("the Hub has had too many requests; asking again in %.0f seconds, as it requests", wait)
        left -= wait
        time.sleep(wait)
    return ask()


def wait_here() -> None:
    """Leave long waits for a busy hub to `patiently`: the hub's own client would wait for as long as a Retry-After says."""
    client = get_session()
    hooks = client.event_hooks
    if _refuse_to_wait not in hooks["response"]:
        client.event_hooks = {**hooks, "response": [*hooks["response"], _refuse_to_wait]}


def _refuse_to_wait(response: Response) -> None:
    if response.status_code in PASSING and seconds_to_wait(response, 0) > WAITS[-1]:
        response.read()
        hf_raise_for_status(response)


def seconds_to_wait(response: Response, usual: float) -> float:
    """The seconds after which a response asks to try again; `usual` if it doesn't say."""
    after = response.headers.get("Retry-After", "")
    limit = parse_ratelimit_headers(response.headers)
    if after.isdigit():
        return int(after)
    return limit.reset_in_seconds if limit and limit.remaining == 0 else usual


def failure(error: HfHubHTTPError | TransportError, where: str) -> RunError:
    """The error to raise, in a line, when the hub has failed for longer than it was asked again."""
    if not isinstance(error, HfHubHTTPError):
        return RunError(f"{where}: the connection to the hub fails ({error}); check the network, then {AGAIN}")
    status, wait = error.response.status_code, seconds_to_wait(error.response, 0)
    said = f"{status}: {error.server_message or error.response.reason_phrase}".replace("\n", " ")
    if status == TOO_MANY:
        when = f" in {wait:,.0f} seconds" if wait > MAX_WAIT else ""
        return RunError(f"{where}: the hub has had too many requests ({said}); {AGAIN}{when}")
    if status in PASSING:
        return RunError(f"{where}: the hub failed ({said}); {AGAIN}")
    return RunError(
        f"{where}: the hub no longer returns it ({said}); check the dataset's page and HF_TOKEN, then {AGAIN}"
    )


class HubStream(AbstractBufferedFile):
    """A file of a repository at a commit (`hf://datasets/org/name@commit/path`), read in ranges.

    Raises RunError when the hub fails for longer than it is asked again.
    """

    def __init__(self, file: SourceFile, block_size: int, cache: str) -> None:
        repository, _, rest = file.uri.removeprefix("hf://datasets/").partition("@")
        commit, _, name = rest.partition("/")
        self._url = hf_hub_url(repository, name, repo_type="dataset", revision=commit, endpoint=endpoint())
        super().__init__(None, file.uri, "rb", cast("str", block_size), cache_type=cache, size=file.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        try:
            content = patiently(lambda: self._asked(f"bytes={start}-{end - 1}"), TransportError).content
        except (HfHubHTTPError, TransportError) as error:
            raise failure(error, self.path) from error
        if len(content) != end - start:
            raise RunError(
                f"{self.path}: {len(content):,} bytes arrived instead of {end - start:,}; run the same command again, or check "
                "HF_ENDPOINT"
            )
        return content

    def _asked(self, part: str) -> Response:
        """The answer to one request for a part of the file, two if its place has changed."""
        if place := PLACES.get(self.path):
            try:
                response = get_session().get(place, headers={"Range": part}, timeout=TIMEOUT)
            except TransportError:  # a server that is gone may have a successor, which the hub knows
                PLACES.pop(self.path, None)
            else:
                if response.status_code not in EXPIRED:
                    hf_raise_for_status(response)
                    return response
        response = get_session().get(self._url, headers={"Range": part, **build_hf_headers()}, timeout=TIMEOUT)
        hf_raise_for_status(response)
        if urlsplit(str(response.url)).netloc != urlsplit(self._url).netloc:
            if len(PLACES) >= MAX_PLACES:
                PLACES.clear()
            PLACES[self.path] = str(response.url)
        return response

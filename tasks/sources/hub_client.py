"""Requests to the Hugging Face Hub: patient ones, the information of a repository, a sentence for each way to fail, and files as streams.

The Hub's own client waits without end for a host that swallows packets, once per address of the host, and gives up at once when
the Hub is merely busy. Here an unreachable Hub is reported after SECONDS at most, in any state of the network, and a busy one (429
and 5xx) is asked again after its Retry-After.

The Hub limits requests per account, and discovery already knows the size and commit of every file. So no worker lists
anything: a read is one range request. For a large file, the Hub answers with the place where it is stored, signed for some
time; later reads of any stream in this process use it directly, and the Hub is asked again only when that address rejects them.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from json import JSONDecodeError
from threading import Event, Thread
from typing import Any, Literal, TypeVar, cast
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from fsspec.spec import AbstractBufferedFile
from httpx2 import InvalidURL, Response, Timeout, TransportError
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, parse_ratelimit_headers
from tokenmill.tasks.errors import InputError, RunError

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

Kind = Literal["model", "dataset"]
Traced = Callable[[str, object], None]

SECONDS = 5.0
"""How long a connection to the hub may take, names and proxies included."""

Answer = TypeVar("Answer")


def endpoint() -> str:
    """Return the address of the hub. Its client reads HF_ENDPOINT only when it is imported."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def patiently(
    ask: Callable[[], Answer],
    passing: type[Exception] | tuple[type[Exception], ...] = (),
    waits: Sequence[float] = WAITS,
) -> Answer:
    """Return the answer of the Hub, which is asked again after its Retry-After if it has had too many requests or failed.

    `passing` are more errors after which it is asked again, `waits` the seconds before that. The last error is raised, as soon as
    the hub asks for more than MAX_WAIT in all. A long wait is logged.
    """
    left = MAX_WAIT
    for usual in waits:
        try:
            return ask()
        except HfHubHTTPError as error:
            wait = seconds_to_wait(error.response, usual)
            if error.response.status_code not in PASSING or wait > left:  # it would fail again
                raise
        except passing:  # a connection was cut, about which the Hub says nothing
            wait = usual
        if wait > WAITS[-1]:
            LOGGER.warning("the Hub has had too many requests; asking again in %.0f seconds, as it requests", wait)
        left -= wait
        time.sleep(wait)
    return ask()


def wait_here() -> None:
    """Leave long waits for a busy Hub to `patiently`: the Hub's own client would wait for the whole Retry-After."""
    client = get_session()
    hooks = client.event_hooks
    if _refuse_to_wait not in hooks["response"]:  # the client is shared, and hooks would pile up
        client.event_hooks = {**hooks, "response": [*hooks["response"], _refuse_to_wait]}


def _refuse_to_wait(response: Response) -> None:
    if response.status_code in PASSING and seconds_to_wait(response, 0) > WAITS[-1]:
        response.read()  # the message of the error is in its body
        hf_raise_for_status(response)


def seconds_to_wait(response: Response, usual: float) -> float:
    """Return the seconds after which a response asks to try again; `usual` by default."""
    after = response.headers.get("Retry-After", "")
    limit = parse_ratelimit_headers(response.headers)
    if after.isdigit():  # not a date
        return int(after)
    return limit.reset_in_seconds if limit and limit.remaining == 0 else usual


def failure(error: HfHubHTTPError | TransportError, where: str) -> RunError:
    """Return the error to raise, in a line, when the hub has failed for longer than it was asked again."""
    if not isinstance(error, HfHubHTTPError):
        return RunError(f"{where}: the connection to the Hub fails ({error}); check the network, then {AGAIN}")
    status, wait = error.response.status_code, seconds_to_wait(error.response, 0)
    said = f"{status}: {error.server_message or error.response.reason_phrase}".replace("\n", " ")
    if status == TOO_MANY:
        when = f" in {wait:,.0f} seconds" if wait > MAX_WAIT else ""
        return RunError(f"{where}: the Hub has had too many requests ({said}); {AGAIN}{when}")
    if status in PASSING:
        return RunError(f"{where}: the Hub failed ({said}); {AGAIN}")
    return RunError(
        f"{where}: the Hub no longer returns it ({said}); check the dataset's page and HF_TOKEN, then {AGAIN}"
    )


class HubUnreachableError(OSError):
    """The Hub didn't answer, or HF_HUB_OFFLINE forbids to ask; the message has the cause and the remedy."""


class OtherKindError(OSError):
    """The Hub has this name only as a repository of a different kind; the message names it."""


def information(
    kind: Kind,
    repository: str,
    revision: str | None,
    *,
    sizes: bool = False,
    waits: Sequence[float] = WAITS,
    seconds: float = 120,
) -> dict[str, Any]:
    """Return the Hub API's record of a repository at a revision: its commit `sha`, the files as `siblings`, the card.

    `sizes` adds sizes and checksums of files. A busy hub is asked again after each of `waits`, and may take `seconds` for an
    answer. Raises HubUnreachableError, OtherKindError, and HfHubHTTPError (see `explained`).
    """
    at = f"/revision/{quote(revision, safe='')}" if revision else ""
    address = f"{endpoint()}/api/{kind}s/{repository}{at}" + ("?blobs=true" if sizes else "")
    try:
        response = patiently(partial(_answer, address, Timeout(seconds, connect=SECONDS)), waits=waits)
    except RepositoryNotFoundError as error:
        other: Kind = "dataset" if kind == "model" else "model"
        if _is_there(other, repository):
            raise OtherKindError(f"it is a {other}, and a {kind} is needed; give the id of a {kind}") from error
        raise
    try:
        return response.json()
    except JSONDecodeError as error:
        raise HubUnreachableError(
            f"{endpoint()} doesn't answer as a Hub; a proxy or a login page may be in between, so check HF_ENDPOINT and the "
            "network"
        ) from error


def _is_there(kind: Kind, repository: str) -> bool:
    with suppress(OSError):
        _answer(f"{endpoint()}/api/{kind}s/{repository}", Timeout(SECONDS))
        return True
    return False


def require_access(kind: Kind, repository: str) -> None:
    """Raises HfHubHTTPError if the files of a repository can't be read: the information of a gated one is public."""
    patiently(partial(_answer, f"{endpoint()}/api/{kind}s/{repository}/auth-check", Timeout(SECONDS)))


def _answer(address: str, timeout: Timeout) -> Response:
    def ask(traced: Traced) -> Response:
        response = get_session().get(
            address, headers=build_hf_headers(), timeout=timeout, extensions={"trace": traced}, follow_redirects=True
        )
        hf_raise_for_status(response)
        return response

    try:
        return _reached(ask)
    except OfflineModeIsEnabled as error:
        raise HubUnreachableError("HF_HUB_OFFLINE is set; unset it") from error
    except (TransportError, InvalidURL, TimeoutError) as error:
        proxy = getproxies().get(endpoint().partition(":")[0])
        through = f" through the proxy {proxy}" if proxy else ""
        raise HubUnreachableError(
            f"{endpoint()} can't be reached{through} ({error}); check the network, or name a mirror in HF_ENDPOINT"
        ) from error


def _reached(ask: Callable[[Traced], Answer]) -> Answer:
    """The answer to a request, without a limit once there is a connection. Raises TimeoutError if there is none.

    The request runs in a thread, because nothing else ends a look-up of a name or the try of one address after the other.
    """
    future: Future[Answer] = Future()
    done_or_connected = Event()

    def traced(event: str, _info: object) -> None:
        if event.endswith(".complete"):  # a connection, its TLS handshake, or a request sent over a kept one
            done_or_connected.set()

    def run() -> None:
        try:
            future.set_result(ask(traced))
        except (OSError, RuntimeError, ValueError, TransportError, InvalidURL) as error:
            future.set_exception(error)
        finally:
            future.cancel()
            done_or_connected.set()

    Thread(target=run, name="hub-request", daemon=True).start()  # a stuck request must not keep the process
    if not done_or_connected.wait(SECONDS):  # the thread is left behind; it ends with the process
        raise TimeoutError(f"no connection within {SECONDS:.0f} s")
    return future.result()


def explained(error: OSError | HFValidationError, kind: Kind, where: str) -> InputError | RunError:
    """Return the error to raise for one of the hub or its cache, in a line that begins with `where`, with the cause and a remedy."""
    said = str(error).partition("\n")[0]
    if isinstance(error, HubUnreachableError | OtherKindError):
        return InputError(f"{where}: {said}")
    if isinstance(error, HFValidationError):
        return InputError(f"{where}: not a valid name of a {kind}: {said}")
    if not isinstance(error, HfHubHTTPError):  # of the disk
        return RunError(
            f"{where}: {error.filename or constants.HF_HUB_CACHE} cannot be written ({error.strerror or said}); free space "
            "there, or set HF_HOME to a folder with space"
        )
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        why = "access is restricted; accept the terms on its Hub page, then set HF_TOKEN to a token of that account"
    elif isinstance(error, RevisionNotFoundError):
        why = "it doesn't have a branch, tag or commit with that name; check the revision, or remove it"
    elif status in {401, 403} and "Invalid credentials" in str(error):
        why = "the Hub rejected HF_TOKEN (or the saved login); renew it, or unset it for public repositories"
    elif status in {401, 403} or isinstance(error, RepositoryNotFoundError):  # the Hub answers 401 for both
        why = f"no such {kind} on the Hub, or it is private; check the spelling, or set HF_TOKEN to a token with access"
    elif status in PASSING:
        return failure(error, where)
    else:
        why = f"{endpoint()} answered: {said}; check HF_ENDPOINT"
    return InputError(f"{where}: {why}")


class HubStream(AbstractBufferedFile):
    """A file of a repository at a commit (`hf://datasets/org/name@commit/path`), read in ranges.

    Raises RunError when the hub fails for longer than it is asked again.
    """

    def __init__(self, file: SourceFile, block_size: int, cache: str) -> None:
        repository, _, rest = file.uri.removeprefix("hf://datasets/").partition("@")
        commit, _, name = rest.partition("/")  # a commit has no slash, unlike a branch
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
            if len(PLACES) >= MAX_PLACES:  # asking for them again is cheap
                PLACES.clear()
            PLACES[self.path] = str(response.url)
        return response

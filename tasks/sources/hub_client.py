"""Requests for the information of a repository of the Hugging Face hub, and a sentence for each way they can fail.

The hub's own client waits without end for a host that swallows packets, once per address of the host, and gives up at once when
the hub is merely busy. Here an unreachable hub is reported after SECONDS at most, whatever the network does, and a busy one (429
and 5xx) is asked again when its Retry-After says.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from json import JSONDecodeError
from threading import Event, Thread
from typing import Any, Literal, TypeVar
from urllib.parse import quote
from urllib.request import getproxies

from httpx2 import InvalidURL, Response, Timeout, TransportError
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tokenmill.tasks.errors import InputError, RunError

from .hub_requests import PASSING, WAITS, endpoint, failure, patiently

Kind = Literal["model", "dataset"]
Answer = TypeVar("Answer")
Traced = Callable[[str, object], None]

SECONDS = 5.0
"""How long a connection to the hub may take, names and proxies included."""


class HubUnreachableError(OSError):
    """The hub gave no answer, or HF_HUB_OFFLINE forbids to ask; the message says why, and the remedy."""


class OtherKindError(OSError):
    """The hub has no repository of that kind and name, but one of a different kind; the message says so."""


def information(
    kind: Kind,
    repository: str,
    revision: str | None,
    *,
    sizes: bool = False,
    waits: Sequence[float] = WAITS,
    seconds: float = 120,
) -> dict[str, Any]:
    """What the hub's API says about a repository at a revision: its commit `sha`, the files as `siblings`, the card.

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
            f"{endpoint()} doesn't answer as a hub; a proxy or a login page may be in between, so check HF_ENDPOINT and the "
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
    """The answer to a request, however long it takes once there is a connection. Raises TimeoutError if there is none.

    The request runs in a thread, because nothing else ends a look-up of a name or the try of one address after the other.
    """
    future: Future[Answer] = Future()
    done_or_connected = Event()

    def traced(event: str, _info: object) -> None:
        if event.endswith(".complete"):
            done_or_connected.set()

    def run() -> None:
        try:
            future.set_result(ask(traced))
        except (OSError, RuntimeError, ValueError, TransportError, InvalidURL) as error:
            future.set_exception(error)
        finally:
            future.cancel()
            done_or_connected.set()

    Thread(target=run, name="hub-request", daemon=True).start()
    if not done_or_connected.wait(SECONDS):
        raise TimeoutError(f"no connection within {SECONDS:.0f} s")
    return future.result()


def explained(error: OSError | HFValidationError, kind: Kind, where: str) -> InputError | RunError:
    """The error to raise for one of the hub or its cache, in a line that begins with `where`, with the cause and a remedy."""
    said = str(error).partition("\n")[0]
    if isinstance(error, HubUnreachableError | OtherKindError):
        return InputError(f"{where}: {said}")
    if isinstance(error, HFValidationError):
        return InputError(f"{where}: not a valid name of a {kind}: {said}")
    if isinstance(error, HfHubHTTPError):
        return _answered(error, kind, where, said)
    return RunError(
        f"{where}: {error.filename or constants.HF_HUB_CACHE} cannot be written ({error.strerror or said}); free space there, "
        "or set HF_HOME to a folder with space"
    )


def _answered(error: HfHubHTTPError, kind: Kind, where: str, said: str) -> InputError | RunError:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        why = "access is restricted; accept the terms on its hub page, then set HF_TOKEN to a token of that account"
    elif isinstance(error, RevisionNotFoundError):
        why = "it doesn't have a branch, tag or commit with that name; check the revision, or remove it"
    elif status in {401, 403} and "Invalid credentials" in str(error):
        why = "the Hub rejected HF_TOKEN (or the saved login); renew it, or unset it for public repositories"
    elif status in {401, 403} or isinstance(error, RepositoryNotFoundError):
        why = f"no such {kind} on the hub, or it is private; check the spelling, or set HF_TOKEN to a token with access"
    elif status not in PASSING:
        why = f"{endpoint()} answered: {said}; check HF_ENDPOINT"
    else:
        return failure(error, where)
    return InputError(f"{where}: {why}")

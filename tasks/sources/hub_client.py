"""One request for the information of a repository of the Hugging Face hub, and a sentence for each way it can fail.

The hub's own client waits without end for a host that swallows packets, once per address of the host, and gives up at once when
the hub is merely busy. Here an unreachable hub is reported after SECONDS at most, whatever the network does, and a busy one (429
and 5xx) is asked again as its Retry-After says.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from json import JSONDecodeError
from threading import Event, Thread
from typing import Any, Literal, TypeVar, cast
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
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

Kind = Literal["models", "datasets"]
Answer = TypeVar("Answer")

SECONDS = 5.0
"""How long a connection to the hub may take, names and proxies included."""

TRIES = 4
"""How often a busy hub is asked again."""

BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""The answers of a hub that may give a different one later."""


class HubUnreachableError(OSError):
    """The hub gave no answer, or HF_HUB_OFFLINE forbids to ask; the message says why, and the remedy."""


def endpoint() -> str:
    """The address of the hub. Its client reads HF_ENDPOINT only when it is imported."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def information(
    kind: Kind, repository: str, revision: str | None, *, sizes: bool = False, tries: int = TRIES, seconds: float = 60
) -> dict[str, Any]:
    """What the hub's API says about a repository at a revision: its commit `sha`, the files as `siblings`, the card.

    `sizes` adds sizes and checksums of files. A busy hub is asked `tries` times again, and may take `seconds` for an answer.
    Raises HubUnreachableError, and HfHubHTTPError (see `reason`).
    """
    at = f"/revision/{quote(revision, safe='')}" if revision else ""

    def ask(traced: Callable[[str, object], None]) -> Response:
        response = http_backoff(
            "GET",
            f"{endpoint()}/api/{kind}/{repository}{at}",
            params={"blobs": True} if sizes else {},
            headers=build_hf_headers(),
            timeout=Timeout(seconds, connect=SECONDS),
            max_retries=tries,
            retry_on_exceptions=(),
            extensions={"trace": traced},
        )
        hf_raise_for_status(response)
        return response

    try:
        return cast("dict[str, Any]", _reached(ask).json())
    except OfflineModeIsEnabled as error:
        raise HubUnreachableError("HF_HUB_OFFLINE is set; unset it") from error
    except (TransportError, InvalidURL, TimeoutError) as error:
        proxy = getproxies().get(endpoint().partition(":")[0])
        through = f" through the proxy {proxy}" if proxy else ""
        raise HubUnreachableError(
            f"{endpoint()} can't be reached{through} ({error}); check the network, or name a mirror in HF_ENDPOINT"
        ) from error
    except JSONDecodeError as error:
        raise HubUnreachableError(
            f"{endpoint()} doesn't answer as a hub; a proxy or a login page may be in between, so check HF_ENDPOINT and the network"
        ) from error


def _reached(ask: Callable[[Callable[[str, object], None]], Answer]) -> Answer:
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


def reason(error: HfHubHTTPError | HFValidationError, kind: Kind, repository: str, revision: str | None) -> str:
    """Why the hub gave no repository or file, with the remedy, in a sentence that follows `repository: `."""
    one, said = kind.removesuffix("s"), " ".join(str(error).split())
    if isinstance(error, HFValidationError):
        return f"not a valid name of a {one}: {said}"
    page = f"{endpoint()}/{'datasets/' if kind == 'datasets' else ''}{repository}"
    status = error.response.status_code
    is_forbidden = status in {401, 403}
    sentences = {
        f"access is restricted; accept the terms on {page}, then set HF_TOKEN to a token of that account": isinstance(
            error, GatedRepoError
        ),
        f"it has no branch, tag or commit {revision!r}; check the revision, or leave it out": isinstance(
            error, RevisionNotFoundError
        ),
        "the hub refused HF_TOKEN (or the saved login); renew it, or unset it for what is public": is_forbidden
        and "Invalid credentials" in said,
        f"no such {one} on the hub, or it is private; check the spelling, or set HF_TOKEN to a token with access": is_forbidden
        or isinstance(error, RepositoryNotFoundError),
        f"the hub is busy (it answered {status}, also when asked again); run the same command again": status in BUSY,
    }
    found = next((sentence for sentence, applies in sentences.items() if applies), None)
    return found or f"the hub answered {status}: {said[:200]}; check HF_ENDPOINT"

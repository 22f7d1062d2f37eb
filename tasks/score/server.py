"""NLL and embeddings from a running server: vLLM or SGLang.

Both serve the OpenAI API and `/tokenize`. Embeddings are from `/v1/embeddings`. NLL needs the log-probability of every token
of a prompt: vLLM returns them from `/v1/completions` (`prompt_logprobs`), SGLang from its own `/generate` (`return_logprob`).
`/v1/models` identifies the server (`owned_by`) and its context length (`max_model_len`). Formats:
docs.vllm.ai/en/stable/serving/openai_compatible_server, docs.sglang.io/basic_usage/native_api.

Prompts are sent as token ids, and the server returns an id with each log-probability, which must be the id that was sent.
Before that, both sides tokenize a text and must agree.

Each request is one sequence or text; the server makes the batches. Requests that fail transiently are retried only here: the
final failure is a RunError, which the task does not retry.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError, RunError

from .embed import unit_vectors, wanted_dimensions
from .nll import Completions, score_table, targets_of
from .tables import ROW, NonFiniteError, Place, require_finite

KEY = "TOKENMILL_SERVER_KEY"  # the environment variable that holds the server's key, if it requires one
TIMEOUT = httpx.Timeout(300, connect=10)  # timeouts in seconds: for a response, and for a connection
DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds to wait before each retry

PASSING = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
BUSY = {429, 502, 503, 504}  # transient errors and statuses

SGLANG = "sglang"
# Tokens of its context that a server reserves: SGLang (0.5) rejects prompts of `max_model_len - 6` or more tokens.
RESERVED = {SGLANG: 7}

MINUS_INFINITY = -9999.0  # vLLM's encoding of a log-probability of minus infinity, which JSON lacks

# vLLM's error for a request whose response would contain NaN.
NOT_JSON = "Out of range float values are not JSON compliant"

PROBE = "3.14 naïve façades in 東京 🙂\n\tdef f(x): return 2718"  # a text that different tokenizers encode differently

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Server:
    """A server of `model`, with at most `concurrency` requests in flight.

    `limit` is the number of tokens it reads, None if unknown. Raises InputError for a server that does not serve the model or
    rejects the key, RunError for an unreachable one.
    """

    def __init__(self, url: str, model: str, concurrency: int) -> None:
        self._url, self._model, self._concurrency = url.rstrip("/").removesuffix("/v1"), model, concurrency
        key = os.environ.get(KEY)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=concurrency),
        )
        models = self._ask("/v1/models", lambda answer: {each["id"]: each for each in answer["data"]})
        if model not in models:
            raise InputError(
                f"model: {self._url} serves {', '.join(models) or 'no model'}, not {model!r}; set model to a served one"
            )
        self._kind, length = models[model].get("owned_by"), models[model].get("max_model_len")
        self.limit: int | None = None if length is None else length - RESERVED.get(self._kind, 0)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Map `function` over items, up to the concurrency limit at a time; stop at the first error."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(function, items))

    def logprobs(self, prompt: str | Sequence[int]) -> list[tuple[int, float]]:
        """Id and log-probability of every token of a prompt but the first."""

        def number(logprob: float | None) -> float:  # as an IEEE 754 value
            return float("nan") if logprob is None else float("-inf") if logprob == MINUS_INFINITY else logprob

        def of_sglang(answer: Any) -> list[tuple[int, float]]:  # noqa: ANN401 - JSON
            return [(token, number(logprob)) for logprob, token, _ in answer["meta_info"]["input_token_logprobs"][1:]]

        def of_vllm(answer: Any) -> list[tuple[int, float]]:  # noqa: ANN401 - JSON
            # With prompt_logprobs=0, each token has one entry: its own.
            entries = [next(iter(each.items())) for each in answer["choices"][0]["prompt_logprobs"][1:]]
            return [(int(token), number(entry["logprob"])) for token, entry in entries]

        if self._kind == SGLANG:
            asked = {
                "text" if isinstance(prompt, str) else "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True, "logprob_start_len": 0,
            }  # fmt: skip
            return self._ask("/generate", of_sglang, asked)
        asked = {
            "model": self._model, "prompt": prompt, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0,
            "add_special_tokens": False,
        }  # fmt: skip
        return self._ask("/v1/completions", of_vllm, asked)

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens that the model adds."""
        asked = {"model": self._model, "prompt": text, "add_special_tokens": special}
        return self._ask("/tokenize", lambda answer: list(answer["tokens"]), asked)

    def vector(self, ids: Sequence[int]) -> np.ndarray:
        """Return the embedding of a text, float32 [dimensions]."""
        asked = {"model": self._model, "input": [ids], "encoding_format": "float"}
        return self._ask("/v1/embeddings", lambda answer: np.array(answer["data"][0]["embedding"], np.float32), asked)

    def _ask(self, path: str, read: Callable[[Any], Answer], body: Mapping[str, Any] | None = None) -> Answer:
        """GET, or POST a body, and `read` the answer. Retries transient failures."""
        place, failure = f"{self._url}{path}", ""
        for delay in (*DELAYS, None):
            try:
                response = self._client.request("POST" if body else "GET", place, json=body)
            except PASSING as error:
                failure = f"cannot be reached: {error}"
            except httpx.HTTPError as error:
                raise RunError(
                    f"{place}: {error or type(error).__name__}; check server=, or lower concurrency"
                ) from error
            else:
                if response.status_code not in BUSY:
                    return _answer(place, response, read)
                failure = f"answered {response.status_code}: {_shortened(response)}"
            if delay is not None:
                time.sleep(delay)
        raise RunError(
            f"{place} {failure} ({len(DELAYS) + 1} tries); start the server, or correct server=, and rerun: finished shards "
            "are reused"
        )


def _answer(place: str, response: httpx.Response, read: Callable[[Any], Answer]) -> Answer:
    """The answer in a response. Raises InputError for errors that the caller can fix, RunError for all others."""
    said = f"{place} answered {response.status_code}: {_shortened(response)}"
    if response.status_code in {401, 403}:
        raise InputError(f"{said}; set {KEY} to the server's key, for workers too")
    if response.status_code in {404, 405}:
        raise InputError(f"{said}; engine=server needs a vLLM or SGLang server that serves this task")
    if NOT_JSON in response.text:
        raise NonFiniteError(f"{said}; the model returns NaN: check it, or serve it in float32")
    if not response.is_success:
        raise RunError(f"{said}; see the server's log")
    try:
        return read(response.json())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{said}; this is not the response of vLLM or SGLang ({error!r}): use one of them") from error


class ServerScorer:
    """Scores sequences with a server's model. `limit` is the maximum number of tokens read per sequence.

    `encode` tokenizes rows. Raises InputError if the server tokenizes a text differently.
    """

    def __init__(self, server: Server, max_length: int | None, encode: Callable[[str], Sequence[int]]) -> None:
        self._server = server
        # One token less than the context, because the server must generate one after the prompt.
        limits = [max_length, None if server.limit is None else server.limit - 1]
        self.limit = min((each for each in limits if each is not None), default=None)
        ours, found = list(encode(PROBE)), [token for token, _ in server.logprobs(PROBE)]
        if found[1 - len(ours) :] != ours[1:]:  # the server may prepend a token, and never scores the first
            raise InputError(
                f"tokenizer: the server encodes {PROBE!r} as {found[:8]}, this tokenizer as {ours[:8]}; set "
                "tokenizer and chat_template as in the served model"
            )

    def score(self, sequences: Completions, place: Place = ROW) -> pa.Table:
        targets = targets_of(sequences, self.limit)
        nll = np.empty(len(targets.places), np.float32)

        def fill(row: int) -> None:
            start = int(sequences.offsets[row])
            ids = sequences.ids[start : start + int(targets.reach[row]) + 1].tolist()  # up to the last one needed
            try:
                found = self._server.logprobs(ids)
            except NonFiniteError:
                found = [(token, float("nan")) for token in ids[1:]]
            except RunError as error:
                raise RunError(f"{place(row)}: {error}") from error
            tokens = [token for token, _ in found]
            if tokens != ids[1:]:
                pairs = enumerate(zip(tokens, ids[1:], strict=False), 1)
                differing = (f"token {at} is {one}, not {sent}" for at, (one, sent) in pairs if one != sent)
                difference = next(differing, f"{len(found) + 1} were returned")
                raise RunError(
                    f"{place(row)}: the log-probabilities don't belong to the {len(ids)} tokens sent: {difference}; turn off "
                    "server features that change or truncate prompts"
                )
            chosen = slice(*targets.bounds[row : row + 2].tolist())
            all_nll = -np.array([logprob for _, logprob in found], np.float32)
            nll[chosen] = all_nll[targets.positions[chosen] - 1]  # the server doesn't score the first token either
            require_finite(nll[chosen], targets.rows[chosen], "NLL of a token", place)

        self._server.map(fill, np.flatnonzero(targets.reach).tolist())
        return score_table(sequences, targets, nll, self.limit, place)


class ServerEmbedder:
    """Embeds texts with a server's model, which tokenizes and pools. See Embedder.

    A text that is too long is truncated here, but keeps the tokens that the model appends to every text.
    """

    def __init__(self, server: Server, dimensions: int | None, max_tokens: int) -> None:
        self._server = server
        self.max_tokens = max_tokens if server.limit is None else min(max_tokens, server.limit)
        whole, bare = server.tokens("a"), server.tokens("a", special=False)
        behind = next((at for at in range(len(whole), 0, -1) if whole[:at][-len(bare) :] == bare), len(whole))
        self._end = whole[behind:]
        self._available = len(server.vector(whole))
        self.dimensions = wanted_dimensions(dimensions, self._available)
        self._last: tuple[list[str], list[list[int]]] = ([], [])

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self._server.map(self._vector, self._tokens(texts))
        return unit_vectors(np.reshape(vectors, (len(texts), self._available)), self.dimensions)

    def token_counts(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([len(ids) for ids in self._tokens(texts)], np.int32)

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts; the last texts are cached, because they are counted before they are embedded."""
        if self._last[0] != texts:
            self._last = (list(texts), self._server.map(self._server.tokens, texts))
        return self._last[1]

    def _vector(self, ids: list[int]) -> np.ndarray:
        """The embedding of a text, or NaN if the server cannot encode it, for `as_stored` to report."""
        cut = ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - len(self._end)], *self._end]
        try:
            return self._server.vector(cut)
        except NonFiniteError:
            return np.full(self._available, np.nan, np.float32)


def _shortened(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:300]

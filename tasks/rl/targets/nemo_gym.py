"""NeMo-Gym: rows with a request, which its servers validate with a pydantic model of OpenAI's types.

`nemo_gym_request.json` is that model as a schema of pydantic-core, generated from the `openai` package by
`tests/peers/nemo_gym_request.py`; a test keeps the two equal. A request with plain messages takes 2 µs, other valid ones 15 µs, a faulty one 0.2 ms.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Any, cast

import orjson
from pydantic_core import ErrorDetails, SchemaValidator, ValidationError
from tokenmill.tasks.chat.json_values import kind, listed
from tokenmill.tasks.rl.rows import (
    PARAMS,
    Record,
    RowTarget,
    contents,
    filled_text,
    known_role,
    placeholder_of,
    texts_in,
    texts_of_messages,
    tools,
    wrong_type,
)
from tokenmill.tasks.sources.exact_json import RepeatedKeys
from tokenmill.tasks.sources.files import Rejected

SCHEMAS = "nemo_gym_request.json"

ROLES = ("user", "assistant", "system", "developer")
"""Authors of messages of the Responses API, where a tool's result is a separate item."""

OVERWRITTEN = ("temperature", "top_p")
"""Parameters that NeMo-RL overwrites in every request (`_prepare_nemo_gym_rows`), so a row may give them any value."""

MESSAGE_KEYS = len(("role", "content"))
NESTED = frozenset((dict, list, RepeatedKeys))
"""Types of unhashable values."""

VIDEO_SOURCES = ("video_url", "video")
TOKEN_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
"""Keys that NeMo-Gym adds to OpenAI's items."""

REASONS = {"input": "bad_item", "tools": "bad_tools"}
"""Reasons by parameter; all other faults are `bad_parameter`, or `unknown_parameter`."""

REMEDIES = {
    "input": "make it an item of the Responses API",
    "tools": "write tools as the Responses API has them: type, name, parameters and strict side by side",
}


def _check(record: Record) -> Rejected | None:
    if field := placeholder_of(record):
        remedy = "resolve it with the transform resolve_placeholders"
        return Rejected("unresolved_placeholder", f"{field} is where the question should be; {remedy}")
    if record.get("_rowidx") is not None:
        why = "_rowidx is overwritten by NeMo-RL, which numbers rows by it"
        return Rejected("reserved_field", f"{why}; rename or remove it")
    params = record.get(PARAMS)
    if not isinstance(params, dict):
        return wrong_type(PARAMS, params, "an object with input")
    most = params.get("max_output_tokens")
    if isinstance(most, str):
        return wrong_type(f"{PARAMS}.max_output_tokens", most, "a number, which NeMo-RL compares with its own limit")
    # An empty input is fine: the environment asks the first question.
    items = params.get("input")
    if not isinstance(items, list | str):
        return wrong_type(f"{PARAMS}.input", items, 'text or an array of messages: [{"role": "user", "content": "…"}]')
    fault = request_fault({name: value for name, value in params.items() if name not in OVERWRITTEN})
    return (fault and (_described(params, items) or fault)) or _agent(record.get("agent_ref"))


def _agent(agent: object) -> Rejected | None:
    if agent is None:
        remedy = 'add it with the transform {"set": {"agent_ref": {"type": "responses_api_agents", "name": "…"}}}'
        return Rejected("missing_field", f"agent_ref, by which NeMo-RL finds the agent, is missing; {remedy}")
    if not isinstance(agent, dict):
        return wrong_type("agent_ref", agent, 'an object: {"type": "responses_api_agents", "name": "…"}')
    return filled_text(agent.get("name"), "agent_ref.name")


def _described(params: Record, items: list[Any] | str) -> Rejected | None:
    """Return the fault of a request if it can be described better than the schema does."""
    for number, item in enumerate(items if isinstance(items, list) else (), 1):
        if wrong := _item(item, f"item {number} of {len(items)} in {PARAMS}.input"):
            return wrong
    if params.get("tools", []) is None:  # NeMo-Gym accepts requests without tools
        return Rejected("bad_tools", f"{PARAMS}.tools is null, which NeMo-Gym rejects; remove it, or make it []")
    return tools(params.get("tools"), f"{PARAMS}.tools")


def _item(item: object, where: str) -> Rejected | None:
    if not isinstance(item, dict):
        return Rejected("bad_message", f"{where} is {kind(item)}; make it an object with role and content")
    fields: Record = item
    given = fields.get("type", "message")
    if not isinstance(given, str) or not given:
        found = "empty" if given == "" else kind(given)
        return Rejected("bad_message", f"the type of {where} is {found}; remove it, or name the type of the item")
    # Calls, results and reasoning have forms of their own, which the schema knows.
    wrong = known_role(fields, ROLES, where) if given == "message" else None
    if wrong or given != "message":
        return wrong
    content = fields.get("content")
    if isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        return None
    if content is None:
        return Rejected("no_content", f"{where} doesn't have content; its keys are {listed(fields)}; write text")
    return Rejected("not_text", f"the content of {where} is {contents(content)}; make it text or an array of parts")


def _texts(record: Record) -> list[str]:
    params = record[PARAMS]
    instructions = [params["instructions"]] if isinstance(params.get("instructions"), str) else []
    asked = params["input"]
    texts = [asked] if isinstance(asked, str) else texts_of_messages(asked)
    return [*instructions, *texts, *texts_in(params.get("tools"))]


TARGETS = [
    RowTarget(
        "nemo_gym",
        _check,
        _texts,
        unread=lambda record: [f"{PARAMS}.{name}" for name in OVERWRITTEN if record[PARAMS].get(name) is not None],
    )
]


def request_fault(params: Mapping[str, Any]) -> Rejected | None:
    """Return why NeMo-Gym rejects the parameters of a request, or None."""
    return None if _is_plain(params) else _schema_fault(params)


def _is_plain(params: Mapping[str, Any]) -> bool:
    """Whether a request has only text messages, and other keys only as accepted with such messages before.

    A message of text has a known role and a text, and nothing else; any text is accepted.
    """
    # The schema would take 15 µs.
    others = dict(params)
    items = others.pop("input")
    for item in items if type(items) is list else (None,):
        if type(item) is not dict or len(item) != MESSAGE_KEYS:
            return False
        message = cast("Record", item)
        if type(message.get("content")) is not str or message.get("role") not in ROLES:
            return False
    return NESTED.isdisjoint(map(type, others.values())) and _accepts(**others)


@lru_cache(maxsize=1024, typed=True)
def _accepts(**others: object) -> bool:
    """Whether NeMo-Gym accepts a message with these other parameters."""
    return _schema_fault({"input": [{"role": "user", "content": ""}], **others}) is None


def _schema_fault(params: Mapping[str, Any]) -> Rejected | None:
    try:
        _validator("request").validate_python(params)
    except ValidationError as error:
        return _rejected(params, error.errors(include_url=False, include_context=False))
    # Rules that NeMo-Gym's validators have in code, which a schema can't express.
    items = cast("list[Record]", params["input"]) if isinstance(params["input"], list) else []
    for number, item in enumerate(items):
        if wrong := _token_ids(item, number) or _video(item, number):
            return wrong
    return None


@cache
def _validator(name: str) -> SchemaValidator:
    return SchemaValidator(
        orjson.loads(resources.files("tokenmill.tasks.rl.targets").joinpath(SCHEMAS).read_bytes())[name]
    )


def _token_ids(item: Record, number: int) -> Rejected | None:
    """Require the token ids and log probabilities that a policy sampled to be complete, if an item has any."""
    if item.keys().isdisjoint(TOKEN_IDS):
        return None
    try:
        _validator("token_ids").validate_python({key: item[key] for key in TOKEN_IDS if key in item})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{PARAMS}.input[{number}].{first['loc'][0]}: {first['msg'].lower()}"
        return Rejected("bad_item", f"{why}; token ids go together, remove them all or complete them")
    return None


def _video(item: Record, number: int) -> Rejected | None:
    """Require one address of a video."""
    content = item.get("content")
    for part in cast("list[Record]", content) if isinstance(content, list) else []:
        if part.get("type") != "input_video":
            continue
        sources = [part[name] for name in VIDEO_SOURCES if name in part]
        source = sources[0] if len(sources) == 1 else None
        address = cast("Record", source).get("url") if isinstance(source, dict) else source
        if not isinstance(address, str) or not address.strip():
            where = f"a video in {PARAMS}.input[{number}] does not have one address"
            return Rejected("bad_item", f"{where}; write video_url or video, and not an empty one")
    return None


def _rejected(params: Mapping[str, Any], errors: list[ErrorDetails]) -> Rejected:
    # There is an error for every form that an item could have: report one for the form that it claims to be, the deepest there.
    error = min(
        errors,
        key=lambda each: (not _is_of_claimed_form(params, each["loc"]), each["type"] == "missing", -len(each["loc"])),
    )
    # The path to the value also names forms, which no key of the row stands for.
    where, value = PARAMS, cast("object", params)
    for number, key in enumerate(error["loc"], 1):
        if isinstance(key, int):
            where += f"[{key}]"
        elif isinstance(value, dict) and (key in value or (number == len(error["loc"]) and error["type"] == "missing")):
            where += f".{key}"
        value = _inner(value, key)
    name, said = str(error["loc"][0]), error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return Rejected("unknown_parameter", f"{where} isn't a parameter that NeMo-Gym knows; remove it")
    why = f"{where}: {said}, and NeMo-Gym rejects the request"
    return Rejected(REASONS.get(name, "bad_parameter"), f"{why}; {REMEDIES.get(name, 'fix or remove it')}")


def _is_of_claimed_form(params: Mapping[str, Any], path: tuple[int | str, ...]) -> bool:
    value: object = params
    # pydantic names the form it tried in the path, between the keys of the value.
    for key in path:
        form = value.get("type", "message") if isinstance(value, dict) else None
        if key == form:
            return True
        value = _inner(value, key)
    return False


def _inner(value: object, key: int | str) -> object:
    """The value under a key; the value itself if the key only names a form."""
    if isinstance(value, dict):
        return cast("dict[object, object]", value).get(key, value)
    if isinstance(value, list) and isinstance(key, int):
        return cast("list[object]", value)[key]
    return value

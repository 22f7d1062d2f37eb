"""The request of a row for NeMo-Gym: whether its servers take it, and whether they read it as what it says.

NeMo-Gym validates every request with a pydantic model of OpenAI's types, which forbids parameters that it does not know.
`nemo_gym_request.json` is that model as a schema of pydantic-core, generated from the `openai` package by the test that
keeps the two equal (`tests/peers/nemo_gym_request.py`); so what is refused here is what a rollout would end with hours
later. A request takes 15 µs, and one with a fault 0.2 ms.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, cast

import orjson
from pydantic_core import ErrorDetails, SchemaValidator, ValidationError
from tokenmill.tasks.chat.conversation import Rejected

from .record import Record

PARAMS = "responses_create_params"

SCHEMAS = "nemo_gym_request.json"

VIDEO_SOURCES = ("video_url", "video")
TOKEN_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
"""Keys of parts and items that NeMo-Gym adds to OpenAI's."""

REASONS = {"input": "bad_item", "tools": "bad_tools"}
"""The reasons for faults in these parameters; `unknown_parameter` for others that are unknown, else `bad_parameter`."""

REMEDIES = {
    "input": "make it an item of the Responses API",
    "tools": "write tools as the Responses API has them: type, name, parameters and strict side by side",
}


def request_fault(params: Mapping[str, Any]) -> Rejected | None:
    """Why NeMo-Gym refuses the parameters of a request, or None."""
    try:
        _validator("request").validate_python(params)
    except ValidationError as error:
        return _rejected(params, error.errors(include_url=False, include_context=False))
    items = cast("list[Record]", params["input"]) if isinstance(params["input"], list) else []
    for number, item in enumerate(items):
        if wrong := _token_ids(item, number) or _video(item, number):
            return wrong
    return None


@cache
def _validator(name: str) -> SchemaValidator:
    found = orjson.loads(resources.files("tokenmill.tasks.rl").joinpath(SCHEMAS).read_bytes())
    return SchemaValidator(found[name])


def _token_ids(item: Record, number: int) -> Rejected | None:
    """Why the ids and log probabilities that a policy has sampled are not whole, where an item has any."""
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
    """Why a part of content that is a video cannot be read: it needs one address."""
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
    error = _meant(params, errors)
    name = str(error["loc"][0])
    where, said = _place(params, error), error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return Rejected("unknown_parameter", f"{where} is no parameter that NeMo-Gym knows; remove it")
    why = f"{where}: {said}, and NeMo-Gym refuses the request"
    return Rejected(REASONS.get(name, "bad_parameter"), f"{why}; {REMEDIES.get(name, 'fix or remove it')}")


def _meant(params: Mapping[str, Any], errors: list[ErrorDetails]) -> ErrorDetails:
    """Of the errors of all forms that a value might have had, one of the form that it says it has."""

    def rank(error: ErrorDetails) -> tuple[bool, bool, int]:
        return not _is_of_its_form(params, error["loc"]), error["type"] == "missing", -len(error["loc"])

    return min(errors, key=rank)


def _is_of_its_form(params: Mapping[str, Any], path: tuple[int | str, ...]) -> bool:
    value: object = params
    for key in path:
        form = value.get("type", "message") if isinstance(value, dict) else None
        if key == form:
            return True
        value = _inner(value, key)
    return False


def _inner(value: object, key: int | str) -> object:
    """What stands in a value under a key; the value itself where the key only names a form."""
    if isinstance(value, dict):
        return cast("dict[object, object]", value).get(key, value)
    if isinstance(value, list) and isinstance(key, int):
        return cast("list[object]", value)[key]
    return value


def _place(params: Mapping[str, Any], error: ErrorDetails) -> str:
    """The path to the value of an error, without the forms on the way."""
    place, value = PARAMS, cast("object", params)
    for number, key in enumerate(error["loc"], 1):
        if isinstance(key, int):
            place += f"[{key}]"
        elif isinstance(value, dict) and (key in value or (number == len(error["loc"]) and error["type"] == "missing")):
            place += f".{key}"
        value = _inner(value, key)
    return place

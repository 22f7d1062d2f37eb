"""What all sources of chat have in common: messages, tools, and a few columns that go by the same names.

The messages are read as for any chat template (`tasks.chat.parse`), with one difference: templates want the arguments
of a call to be an object, and some sources have arrays, which are handed over as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenmill.tasks.chat.conversation import Message, Range, Rejected, RejectionError
from tokenmill.tasks.chat.json_values import json_text, parsed
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.harmony.metadata import of_record, of_tools
from tokenmill.tasks.harmony.turns import Call, Effort, Source, Turn

OFF = "off"
"""What `reasoning` says of a record whose answers are not reasoned about."""

EFFORTS: dict[object, Effort] = {"low": "low", "medium": "medium", "high": "high"}

Arrays = dict[tuple[int, int], list[Any]]
"""Arguments that are arrays, by the number of the message and that of the call in it."""


def chat_source(
    record: Mapping[str, Any], field: str | None = "messages", effort: Effort | None = None
) -> Source | Rejected:
    """The conversation in a record, with the columns that any source may have.

    `field` names the field of the messages; None takes the first of those that chat data usually has. Without
    reasoning, which a record says, there is none and the effort is low.
    """
    messages, arrays = _without_arrays(record.get(field or "messages"))
    given = {**record, field or "messages": messages} if arrays else record
    found = conversation(given, field, "tools")
    if isinstance(found, Rejected):
        return found
    thinks = record.get("reasoning") != OFF
    try:
        turns = [_turn(number, message, arrays, thinks=thinks) for number, message in enumerate(found.messages)]
    except RejectionError as error:
        return Rejected(error.reason, error.detail)
    return Source(
        messages=turns,
        tools=found.tools,
        effort=effort if thinks else "low",
        metadata={**of_record(record), **of_tools(found.tools)},
    )


def single_turn(question: str, answer: str, instructions: str, record: Mapping[str, Any]) -> Source:
    """A question and its answer as a conversation."""
    messages: list[Turn] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Source(messages, instructions=instructions, metadata={**of_record(record), **of_tools([])})


def _turn(number: int, message: Message, arrays: Arrays, *, thinks: bool) -> Turn:
    turn: Turn = {"role": message["role"], "content": message["content"]}
    if thinks and "reasoning_content" in message:
        turn["reasoning_content"] = message["reasoning_content"]
    if "trained" in message:
        turn["trained"] = _is_trained(number, message["trained"])
    if "name" in message:
        turn["name"] = message["name"]
    if "tool_call_id" in message:
        turn["tool_call_id"] = message["tool_call_id"]
    if "tool_calls" in message:
        turn["tool_calls"] = []
        for place, call in enumerate(message["tool_calls"]):
            function = call["function"]
            made: Call = {"name": function["name"], "arguments": arrays.get((number, place), function["arguments"])}
            turn["tool_calls"].append({**made, "id": call["id"]} if "id" in call else made)
    return turn


def _is_trained(number: int, characters: Sequence[Range]) -> bool:
    if characters:
        why = f"message {number + 1} names characters to train on, and Harmony is trained on by whole messages"
        raise RejectionError("bad_loss_flag", f"{why}; remove train_detail, or set train to false")
    return False


def _without_arrays(messages: object) -> tuple[object, Arrays]:
    """The messages with empty arguments in place of arrays, and the arrays; the same object where there are none."""
    arrays: Arrays = {}
    if not isinstance(messages, list):
        return messages, arrays
    plain = list(cast("list[Any]", messages))
    for number, message in enumerate(plain):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if isinstance(calls, list):
            calls = [_without_array(call, (number, place), arrays) for place, call in enumerate(calls)]
            plain[number] = {**message, "tool_calls": calls}
    return (plain if arrays else messages), arrays


def _without_array(call: Any, place: tuple[int, int], arrays: Arrays) -> Any:  # noqa: ANN401 - nobody has looked at it
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _without_array(function, place, arrays)}
    array = _array(call.get("arguments"))
    if array is None:
        return call
    arrays[place] = array
    return {**call, "arguments": {}}


def _array(arguments: object) -> list[Any] | None:
    """Arguments that are an array or the JSON text of one; None for all others, and for what JSON cannot say."""
    try:
        if isinstance(arguments, str) and arguments.lstrip().startswith("["):
            return cast("list[Any]", parsed(arguments, "bad_tool_arguments", "arguments"))
        if isinstance(arguments, list):
            json_text(cast("list[Any]", arguments), "bad_tool_arguments", "arguments")
            return cast("list[Any]", arguments)
    except RejectionError:
        return None
    return None

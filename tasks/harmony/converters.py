"""Converters: one function for each source of chat data, from a record to a conversation.

NVIDIA's datasets on the hub that are recognized by name:

    Nemotron-Math-v2                        competition problems, with and without Python; the effort is the split's
    Nemotron-Math-Proofs-v1                 problems, their statements in Lean 4, and proofs of two in three rows
    Nemotron-Science-v1                     questions, multiple choice or open, with reasoned answers
    Nemotron-Agentic-v1                     conversations with up to 372 tools, most with several turns
    Nemotron-Instruction-Following-Chat-v1  chats of many turns; `reasoning: off` means low effort and no reasoning

All other sources are OpenAI messages, ShareGPT turns, a question with its answer, or Harmony text; each row shows which. To add
a source, add a function and a line in `CONVERTERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

from tokenmill.tasks.chat.conversation import Message, RejectionError, apart, rejecting, required
from tokenmill.tasks.chat.json_values import json_text, kind, parsed
from tokenmill.tasks.chat.messages import CUT, read_template_kwargs
from tokenmill.tasks.chat.parse import conversation, unread_beside
from tokenmill.tasks.chat.shapes import KWARGS, TOOLS, Given, layout_of, value_at
from tokenmill.tasks.sources.files import Rejected

from .columns import effort_of, of_evaluation, of_record, of_tools
from .compose import PYTHON_TOOLS, function_of, untrained_numbers
from .grammar import START, Fault, parse
from .message import Call, Composed, Effort, HarmonyMessage, Source, Turn
from .preamble import declared
from .render import harmony_messages

Record = Mapping[str, Any]


class Names(NamedTuple):
    """The fields that a blend names: of messages, of tools, and of other parts."""

    messages: str | None = None
    tools: str = TOOLS[0]
    given: Given = ()


UNNAMED = Names()

Converter = Callable[[Record, str, Names], Source | Composed | Rejected]
"""Converts a record, given its split's name and the fields' names, to a conversation, possibly one already in Harmony."""

ProofTask = Literal["proof", "formalize", "both"]

OFF = "off"  # value of `reasoning` for a record without reasoning
EFFORT = "reasoning_effort"  # OpenAI's parameter, and the variable of gpt-oss's own template

EFFORTS: dict[str, Effort] = {
    "none": "low", "off": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
"""The effort for each value of EFFORT in lower case: Harmony has three."""

TEXT = "text"  # the default field of Harmony text
UNTRAINED = "untrained_messages"  # the field of normalized rows with the numbers of messages that are not trained on

SOLVE = "Solve the problem and put the final answer within \\boxed{}. Do not guess."
FORMALIZE = "State the problem as a theorem in Lean 4. Answer with Lean code alone."

Arrays = dict[tuple[int, int], list[Any]]  # arguments that are arrays, by the numbers of the message and of its call


@rejecting
def chat(
    record: Record, names: Names = UNNAMED, field: str | None = "messages", effort: Effort | None = None
) -> Source:
    """Return the conversation in a record, with the columns that any source may have.

    `field` names the field of the messages, if the blend doesn't; None takes the first of the usual fields. A record with
    reasoning turned off gets low effort. Messages are read as for a chat template, but arguments of calls may be arrays, and
    messages of openai-harmony are kept as they are.
    """
    # A question and its answer are named instead of messages.
    field = None if "prompt" in dict(names.given) else names.messages or field
    written = _written(record, field, names)
    if written is not None:
        return written
    messages, arrays = _without_arrays(record.get(field or "messages"))
    given = {**record, field or "messages": messages} if arrays else record
    found = required(apart(required(conversation(given, field, names.tools, names.given)), "closed"))
    thinks = record.get("reasoning") != OFF
    stated, unread = _effort_of(record, found.variables)
    if any("cut" in message for message in found.messages):  # a budget ended the reasoning: Harmony can't express that
        unread.append(CUT[0])
    return Source(
        messages=[_turn(number, message, arrays, thinks=thinks) for number, message in enumerate(found.messages)],
        tools=found.tools,
        effort=(effort or stated) if thinks else "low",
        metadata={**of_record(record), **of_tools(found.tools)},
        unread=(*(name for name in found.unread if name != EFFORT), *unread),
    )


def _effort_of(record: Record, variables: Mapping[str, Any]) -> tuple[Effort | None, list[str]]:
    """The effort that a record states, itself or for its template, and which of its fields aren't read."""
    given = {EFFORT: record.get(EFFORT), f"{KWARGS}.{EFFORT}": variables.get(EFFORT)}
    efforts = dict[str, Effort | None]()
    for name, value in given.items():
        efforts[name] = EFFORTS.get(value.lower()) if isinstance(value, str) else None
    unread = [name for name, value in given.items() if value is not None and efforts[name] is None]
    if variables.keys() - {EFFORT}:
        unread.append(KWARGS)
    return next((effort for effort in efforts.values() if effort), None), unread


def _written(record: Record, field: str | None, names: Names) -> Source | None:
    """Return the conversation of a record with openai-harmony's messages; None for others."""
    try:
        layout = layout_of(record, field, names.tools, names.given)
        place = layout.shape.messages
        given = value_at(record, place, "no_messages") if place else None
        # Parsing each row's messages twice would double the time, so only text that may have channels is parsed here.
        if isinstance(given, str) and '"channel"' in given:
            given = parsed(given, "no_messages", f"{place} (a string)")
    except RejectionError:
        return None  # which `conversation` explains
    if not isinstance(given, list) or not any(isinstance(each, dict) and each.get("channel") for each in given):
        return None
    if beside := [name for name in (*layout.systems, *layout.tools) if value_at(record, name, "bad_tools")]:
        why = f"{beside[0]} beside messages with channels; put it into their system or developer message"
        raise RejectionError("two_systems", why)
    written = harmony_messages(cast("list[Any]", given))
    stated, unread = _effort_of(record, read_template_kwargs(record.get(KWARGS)))
    return Source(
        [],
        effort=stated,
        metadata={**of_record(record), **of_tools([])},
        unread=(*(name for name in unread_beside(record, layout) if name != EFFORT), *unread),
        written=written,
    )


def _messages(record: Record, _split: str, names: Names = UNNAMED) -> Source | Rejected:
    return chat(record, names)


def openai_messages(record: Record, names: Names = UNNAMED) -> Source | Composed | Rejected:
    """Any chat data, also Harmony text. Every tool is a function, even one named python."""
    field = text_field(record, names)
    return chat(record, names, field=None) if field is None else _harmony_text(record, field)


def text_field(record: Record, names: Names) -> str | None:
    """Return the field of a record's Harmony text; None if its conversation has a different form."""
    field = names.messages or TEXT
    try:
        given = value_at(record, field, "no_messages")
    except RejectionError:
        return field  # which `harmony_text` explains
    # A list of messages as JSON text isn't Harmony text.
    if not isinstance(given, str) or (names.messages and given.lstrip().startswith("[")):
        return None
    if names.messages or given.lstrip().startswith(START):
        return field
    try:
        layout_of(record, None, names.tools, names.given)
    except RejectionError:
        return field
    return None


@rejecting
def harmony_text(record: Record, field: str) -> list[HarmonyMessage]:
    """Return the messages of the Harmony text under `field`, if the strict grammar accepts it."""
    found = parse(value_at(record, field, "no_messages"))
    if isinstance(found, Fault):
        where = f"{field}, character {found.offset}"
        remedy = "if the conversation is elsewhere, name its messages_field"
        raise RejectionError(found.name, f"{where}: {found.detail}; {remedy}")
    given = record.get(UNTRAINED)
    untrained = cast("list[object]", given) if isinstance(given, list) else []
    return [
        replace(each.message, trained=number not in untrained) if untrained else each.message
        for number, each in enumerate(found)
    ]


@rejecting
def _math_v2(record: Record, split: str, names: Names = UNNAMED) -> Source:
    """A solution. Its Python tool, a function in the source, becomes Harmony's built-in one."""
    source = required(chat(record, names, effort=effort_of(split)))
    # Some rows call the tool without an offer.
    offered = {function_of(tool)["name"] for tool in source.tools}
    called = {call["name"] for message in source.messages for call in message.get("tool_calls", ())}
    return replace(
        source,
        instructions=SOLVE,
        python=not PYTHON_TOOLS.isdisjoint(offered | called),
        metadata={**source.metadata, **of_evaluation(record, source.effort, tools=bool(source.tools))},
    )


def _formalize(record: Record, _split: str, _names: Names = UNNAMED) -> Source | Rejected:
    """The problem as the question and its formal statement as the answer."""
    names = ("problem", "lean_header", "formal_statement")
    for name in names:
        value = record.get(name)
        if not isinstance(value, str) or not value.strip():
            found = "blank" if isinstance(value, str) else kind(value)
            return Rejected("no_formal_statement", f"{name} is {found}; both the problem and the statement are needed")
    problem, header, statement = (str(record[name]) for name in names)
    answer = f"{header.rstrip()}\n\n{statement.lstrip()}"
    messages: list[Turn] = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
    return Source(messages, instructions=FORMALIZE, metadata={**of_record(record), **of_tools([])})


@rejecting
def _harmony_text(record: Record, field: str) -> Composed:
    """Harmony text under `field`, if the strict grammar accepts it.

    Headers in the order that models use are rewritten in canonical form; nothing else changes. Texts that declare no tools
    may call any, because public datasets of this kind omit declarations.
    """
    found = required(harmony_text(record, field))
    tagless = not any("<|" in each.body for each in found)
    facts = {**of_record(record), UNTRAINED: untrained_numbers(found)}
    return Composed(found, facts, dict.fromkeys(declared(found)) or None, tagless)


CONVERTERS: dict[str, Converter] = {
    "math_v2": _math_v2,
    "math_proofs": _messages,
    "math_proofs_formalize": _formalize,
    "science": _messages,
    "agentic": _messages,
    "instruction_following": _messages,
    "openai_messages": lambda record, _split, names=UNNAMED: openai_messages(record, names),
    "harmony_text": lambda record, _split, names=UNNAMED: _harmony_text(record, names.messages or TEXT),
}

PROOF_TASKS: dict[ProofTask, tuple[str, ...]] = {
    "proof": ("math_proofs",),
    "formalize": ("math_proofs_formalize",),
    "both": ("math_proofs", "math_proofs_formalize"),
}
"""Converters for rows with proofs, each in a separate pass, so that every pass accounts for every row."""

NAMES = (
    ("math-proofs", "math_proofs"),
    ("math", "math_v2"),
    ("science", "science"),
    ("agentic", "agentic"),
    ("instruction-following-chat", "instruction_following"),
)
"""Part of an NVIDIA repository's name after its `nemotron-`, and its converter; the first match applies."""


def converter_for(path: str) -> str:
    """Return the converter for one of NVIDIA's repositories, or a path that contains its name; `openai_messages` for all others."""
    # The last part that has the name counts: a cache may be in a folder of a similar name.
    names = path.lower().split("/")
    repository = next((name for name in reversed(names) if "nemotron-" in name), "")
    # Others publish these datasets as Harmony text under similar names.
    named = "" if "harmony" in repository else repository.partition("nemotron-")[2]
    return next((converter for part, converter in NAMES if named.startswith(part)), "openai_messages")


def _turn(number: int, message: Message, arrays: Arrays, *, thinks: bool) -> Turn:
    turn: Turn = {"role": message["role"], "content": message["content"]}
    if thinks and "reasoning_content" in message:
        turn["reasoning_content"] = message["reasoning_content"]
    if "trained" in message:
        characters = message["trained"]
        # An empty range of characters excludes the whole message.
        if characters:
            why = f"message {number + 1} names characters to train on, and Harmony is trained on by whole messages"
            raise RejectionError("bad_loss_flag", f"{why}; remove train_detail, or set train to false")
        turn["trained"] = False
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


def _without_arrays(messages: object) -> tuple[object, Arrays]:
    """The messages with empty arguments in place of arrays, and the arrays; the same object if there are none."""
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


def _without_array(call: Any, place: tuple[int, int], arrays: Arrays) -> Any:  # noqa: ANN401 - not checked yet
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _without_array(function, place, arrays)}
    given = call.get("arguments")
    try:
        if isinstance(given, str) and given.lstrip().startswith("["):
            given = parsed(given, "bad_tool_arguments", "arguments")
        elif isinstance(given, list):
            json_text(cast("list[Any]", given), "bad_tool_arguments", "arguments")
    except RejectionError:  # which `conversation` explains
        return call
    if not isinstance(given, list):
        return call
    arrays[place] = cast("list[Any]", given)
    return {**call, "arguments": {}}

"""Compose Harmony messages from a conversation: generated system and developer messages, then the turns.

A turn of other formats becomes several messages: reasoning on `analysis`, text beside calls on `commentary`, every call to its
recipient, the answer on `final`. Harmony doesn't have parallel calls, because a call ends generation. So several calls in a turn are
written one by one, each with its result, if every result can be matched to its call.

A row that Harmony cannot express is rejected with the name of the rule. Text is dropped only if the policy asks for it, and
counted. Cost: 5 µs per message, about 5 ns per byte of arguments, and 5 µs per tool.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

from tokenmill.tasks.chat.conversation import RejectionError, rejecting
from tokenmill.tasks.chat.json_values import kind, parsed, quoted
from tokenmill.tasks.sources.exact_json import compact

from .grammar import TAG
from .message import FUNCTIONS, Call, Composed, HarmonyMessage, Policy, Schemas, Source, Turn
from .preamble import PYTHON, declared, developer_body, schemas, system_body

PYTHON_TOOLS = frozenset({PYTHON, "stateful_python_code_exec", "python_code_exec"})
"""Sources' names of the Python tool that is built into Harmony."""

UNNAMEABLE = re.compile(r"[^A-Za-z0-9_.-]")  # characters that a function's name must not contain in a header

ZERO_WIDTH_SPACE = "\u200b"

FLAT = frozenset((str, int, bool, type(None)))
"""Types that orjson writes as chat templates do; it spells some floats differently."""

_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@rejecting
def compose(source: Source, policy: Policy, *, literally: bool = False) -> Composed:
    """Return the conversation in Harmony. `literally` is for encoding to tokens: special strings in text are kept as plain text."""
    _require_no_names(source.messages)
    recipients = _recipients(source)
    functions = [_renamed(tool, recipients) for tool in source.tools if recipients[function_of(tool)["name"]] != PYTHON]
    before = list(takewhile(lambda message: message["role"] in {"system", "developer"}, source.messages))
    written = _Turns(source.messages[len(before) :], len(before), recipients, policy)
    messages = [*_preamble(source, before, functions, policy), *source.written, *written.messages()]
    # A model learns nothing from messages after its last one.
    trailing = next((place for place, each in enumerate(reversed(messages)) if each.author == "assistant"), None)
    if trailing is None:
        raise RejectionError("no_assistant", f"there is no text to learn: none of {len(messages)} is by the assistant")
    if trailing and policy.trailing == "reject":
        raise RejectionError("last_message_not_assistant", f"{trailing} messages follow the last one by the assistant")
    messages = messages[: len(messages) - trailing]
    count = len(messages)
    if policy.thoughts == "last_turn":
        asked = max((place for place, message in enumerate(messages) if message.author == "user"), default=0)
        messages = [*without_thoughts(messages[:asked]), *messages[asked:]]
    thoughts = count - len(messages)
    # Few texts hold "|", and a search for one character is faster than for two.
    tagless = not any("|" in message.body and "<|" in message.body for message in messages)
    escaped = 0 if tagless or literally else _escape(messages, policy)
    if messages[-1].channel == "final":
        messages[-1].terminator = "return"  # made above, and shared with nobody yet
    renamed = {name: to for name, to in recipients.items() if to not in {FUNCTIONS + name, PYTHON}}
    facts = {
        **source.metadata,
        "meta_effort": source.effort,
        "meta_parallel_calls": written.parallel,
        "meta_renamed_tools": json.dumps(renamed, ensure_ascii=False) if renamed else None,
        "meta_escaped_strings": escaped,
        "meta_dropped_thoughts": thoughts,
        "meta_dropped_trailing": trailing,
        "untrained_messages": untrained_numbers(messages),
    }
    if source.written:  # their schemas are text, and aren't read back
        known: Schemas | None = dict.fromkeys(declared(source.written)) or None
    else:
        known = {**({PYTHON: None} if source.python else {}), **(schemas(functions) if functions else {})}
    return Composed(messages, facts, known, tagless)


def untrained_numbers(messages: Sequence[HarmonyMessage]) -> list[int] | None:
    """Return the numbers of the assistant's messages that aren't trained on; None if there are none."""
    numbers = [number for number, each in enumerate(messages) if each.author == "assistant" and not each.trained]
    return numbers or None


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the function in a tool's definition: under that key, or bare."""
    inner = tool.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else tool


def _require_no_names(messages: Sequence[Turn]) -> None:
    """Raises RejectionError if an author other than a tool has a name, which Harmony text cannot hold."""
    for number, message in enumerate(messages, 1):
        name = message.get("name")
        if name and message["role"] != "tool":
            said = f"message {number} of {len(messages)}: the {message['role']} is named {quoted(name)}"
            raise RejectionError(
                "named_speaker", f"{said}, which would be lost; write the name into the content, or remove it"
            )


def _recipients(source: Source) -> dict[str, str]:
    """The recipient for each name in the source. Raises RejectionError if two names map to one recipient."""
    offered = [str(function_of(tool)["name"]) for tool in source.tools]
    called = [call["name"] for message in source.messages for call in message.get("tool_calls", ())]
    recipients = {name: _recipient(name, source.python) for name in dict.fromkeys([*offered, *called])}
    first: dict[str, str] = {}
    for name, recipient in recipients.items():
        # Python has several names in one source; two functions with one name would be one tool.
        if recipient != PYTHON and first.setdefault(recipient, name) != name:
            both = f"{quoted(first[recipient])} and {quoted(name)}"
            raise RejectionError("tool_name_collision", f"the tools {both} are both {recipient}; rename one")
    return recipients


def _recipient(name: str, python: bool) -> str:
    return PYTHON if python and name in PYTHON_TOOLS else FUNCTIONS + UNNAMEABLE.sub("_", name)


def _preamble(
    source: Source, before: Sequence[Turn], functions: Sequence[dict[str, Any]], policy: Policy
) -> Iterator[HarmonyMessage]:
    """The generated system message, and a developer message if there are instructions or functions. Messages that the source
    has in Harmony lack a system message at most.
    """
    if source.written and source.written[0].author == "system":
        return
    effort = source.effort or policy.effort
    offers = bool(functions) or any(name.startswith(FUNCTIONS) for name in declared(source.written))
    yield HarmonyMessage("system", system_body(effort, python=source.python, functions=offers))
    # Harmony's system message is generated; system messages of the source are instructions, as in OpenAI's API.
    said = [*(message["content"] for message in before), source.instructions]
    instructions = "\n\n".join(text for text in said if text and not text.isspace()) or None
    if instructions or functions:
        yield HarmonyMessage("developer", developer_body(instructions, functions))


def _renamed(tool: dict[str, Any], recipients: Mapping[str, str]) -> dict[str, Any]:
    """The tool with its name in Harmony; usually the same object."""
    function = function_of(tool)
    name = recipients[function["name"]].removeprefix(FUNCTIONS)
    if function["name"] == name:
        return tool
    return {**tool, "name": name} if function is tool else {**tool, "function": {**function, "name": name}}


@dataclass(slots=True)
class _Exchange:
    """A call and its result; `certain` if they were matched by id."""

    call: HarmonyMessage
    identifier: str | None
    result: HarmonyMessage | None = None
    certain: bool = False


@dataclass(slots=True)
class _Turns:
    """Writes the turns after the first `skipped` messages; `parallel` counts turns with several calls."""

    turns: Sequence[Turn]
    skipped: int
    recipients: Mapping[str, str]
    policy: Policy
    parallel: int = 0

    def messages(self) -> list[HarmonyMessage]:
        """Raises RejectionError, with the number of the message, for what Harmony cannot express."""
        messages: list[HarmonyMessage] = []
        place = 0
        while place < len(self.turns):
            turn, end = self.turns[place], place + 1
            if turn.get("tool_calls"):  # whose results belong to it
                while end < len(self.turns) and self.turns[end]["role"] == "tool":
                    end += 1
            try:
                made = self._turn(turn, self.turns[place + 1 : end], last=end == len(self.turns))
                messages += made if turn.get("trained", True) else map(_untrained, made)
            except RejectionError as refusal:
                number, count = self.skipped + place + 1, self.skipped + len(self.turns)
                # The number is of the source's message, which its reader can look up.
                raise RejectionError(refusal.reason, f"message {number} of {count}: {refusal.detail}") from refusal
            place = end
        return messages

    def _turn(self, turn: Turn, results: Sequence[Turn], *, last: bool) -> list[HarmonyMessage]:
        role, calls = turn["role"], turn.get("tool_calls")
        if role == "user":
            return [HarmonyMessage("user", turn["content"] or "")]
        if role == "assistant":
            return [*_said(turn), *self._called(calls, results, last=last)] if calls else _said(turn)
        if role == "tool":
            raise RejectionError("tool_result_without_matching_open_call", "a tool result without a call")
        raise RejectionError("developer_after_user", f"the {role} message is within the conversation")

    def _called(self, calls: Sequence[Call], results: Sequence[Turn], *, last: bool) -> Iterator[HarmonyMessage]:
        """The calls of a turn and their results, in the order of the policy."""
        if len(calls) > 1:
            self.parallel += 1
            if self.policy.parallel_calls == "reject":
                raise RejectionError("parallel_calls", f"it makes {len(calls)} calls at once")
        made = [_Exchange(_call(call, self._recipient(call["name"])), call.get("id")) for call in calls]
        answers = [self._answer(result, made) for result in results]
        waiting = [exchange.call for exchange in made if exchange.result is None]
        if waiting and not last:
            call = quoted(waiting[0].recipient)
            why = f"its call of {call} doesn't have a result, and other messages follow"
            raise RejectionError("unanswered_call_before_next_turn", why)
        if waiting and any(exchange.result is not None and not exchange.certain for exchange in made):
            found = f"{len(made)} calls have {len(made) - len(waiting)} results without ids"
            raise RejectionError("uncertain_pairing", f"{found}, and which belong together is not known")
        if self.policy.parallel_calls == "grouped":
            yield from [exchange.call for exchange in made]
            yield from answers
            return
        for exchange in sorted(
            made, key=lambda exchange: exchange.result is None
        ):  # a call without a result ends the text
            yield exchange.call
            if exchange.result is not None:
                yield exchange.result

    def _answer(self, result: Turn, made: Sequence[_Exchange]) -> HarmonyMessage:
        """The result with the name of its call."""
        identifier, name = result.get("tool_call_id"), result.get("name")
        waiting = [exchange for exchange in made if exchange.result is None]
        # Without ids, results are in the order of their calls.
        known = [exchange for exchange in waiting if identifier and exchange.identifier == identifier]
        candidates = known or [exchange for exchange in waiting if not (identifier and exchange.identifier)]
        if not candidates:
            whose = f"with the id {quoted(identifier)} " if identifier else ""
            why = f"a result {whose}answers none of its {len(made)} calls, or one that has its result"
            raise RejectionError("tool_result_without_matching_open_call", why)
        # A result may also name its function; a name that differs is a fault, not a choice.
        fitting = [each for each in candidates if not name or each.call.recipient == self._recipient(name)]
        if not fitting:
            called = quoted(candidates[0].call.recipient)
            raise RejectionError("tool_result_wrong_name", f"{quoted(name)} answers a call of {called}")
        found = fitting[0]
        found.certain = bool(known)
        found.result = HarmonyMessage(str(found.call.recipient), result["content"] or "", "assistant", "commentary")
        return found.result

    def _recipient(self, name: str) -> str:
        return self.recipients.get(name) or _recipient(name, PYTHON in self.recipients.values())


def _untrained(message: HarmonyMessage) -> HarmonyMessage:
    return replace(message, trained=False)


def _said(turn: Turn) -> list[HarmonyMessage]:
    """Reasoning and text of an assistant turn."""
    thoughts, content = turn.get("reasoning_content"), turn["content"] or ""
    said: list[HarmonyMessage] = []
    if thoughts and not thoughts.isspace():
        said.append(HarmonyMessage("assistant", thoughts, None, "analysis"))
    if not turn.get("tool_calls"):
        said.append(HarmonyMessage("assistant", content, None, "final"))
    # Beside calls, text is a remark to the user, not the answer.
    elif content and not content.isspace():
        said.append(HarmonyMessage("assistant", content, None, "commentary"))
    return said


def _call(call: Call, recipient: str) -> HarmonyMessage:
    value, what = call["arguments"], f"the arguments of {quoted(call['name'])}"
    value = {} if value is None or value == "" else value
    if isinstance(value, str):
        try:
            value = cast("object", parsed(value, "bad_tool_arguments", what))
        except RejectionError as error:
            raise RejectionError("call_args_not_json_object", error.detail) from error
    if not isinstance(value, dict | list):
        raise RejectionError("call_args_not_json_object", f"{what} are {kind(value)}; make them an object")
    arguments = cast("dict[str, Any] | list[Any]", value)
    if recipient == PYTHON:
        # The built-in tool takes code as it is, so the code has to be the only argument.
        given = (
            [(key, each) for key, each in arguments.items() if each is not None] if isinstance(arguments, dict) else []
        )
        if len(given) != 1 or given[0][0] != "code" or not isinstance(given[0][1], str):
            why = "Python is called with other arguments than its code, a string"
            raise RejectionError("bad_python_arguments", why)
        return HarmonyMessage("assistant", given[0][1], PYTHON, "analysis", terminator="call")
    values = arguments.values() if isinstance(arguments, dict) else arguments
    body = compact(arguments).decode() if FLAT.issuperset(map(type, values)) else _written(arguments)
    return HarmonyMessage("assistant", body, recipient, "commentary", "json", terminator="call")


def without_thoughts(messages: Sequence[HarmonyMessage]) -> list[HarmonyMessage]:
    """Return the messages of earlier turns without their reasoning. The assistant's text after it in its turn isn't trained on: a model
    that learns it learns to answer without reasoning.
    """
    kept: list[HarmonyMessage] = []
    thought = False
    for message in messages:
        if message.author == "assistant" and message.channel == "analysis" and message.recipient is None:
            thought = True
            continue
        # A turn ends with the next question.
        thought = thought and message.author != "user"
        kept.append(_untrained(message) if thought and message.author == "assistant" else message)
    return kept


def _escape(messages: list[HarmonyMessage], policy: Policy) -> int:
    """Escape special strings in the messages, and return their number. Raises RejectionError if the policy rejects them."""
    escaped = 0
    for place, message in enumerate(messages):
        if "<|" not in message.body:
            continue
        if policy.special_strings == "reject" and (found := TAG.search(message.body)):
            where = f"message {place + 1} of {len(messages)} in Harmony ({message.author}), character {found.start()}"
            raise RejectionError("special_in_body", f"{where}: the text holds {quoted(found[0])}, which is structure")
        body, count = TAG.subn(lambda tag: "<|" + ZERO_WIDTH_SPACE + tag[0][2:], message.body)
        messages[place], escaped = replace(message, body=body), escaped + count
    return escaped

"""Views of a conversation to embed: the prompt, the reasoning, or the behavior as a short trace.

    TOOL_SEQ: get_order -> refund          tools called, in order, or none
    CALLS: 2
    ARGS: get_order[id] | refund[id,sum]   argument names, never values
    RETURNS: ok | error                    ok, error, empty or missing, per call
    RET_KEYS: state,sum | nonjson          keys of results; dict_empty, list, nonjson, large or missing
    RET_ROLES: functions.get_order | functions.refund
    USED_TOOL_OUTPUT: no                   yes if the answer refers to the output of a tool
    ANSWER_TYPE: text                      empty, boxed, code, numeric, json or text
    PLAN_EXCERPT: Look it up first.

The tool of a call is its recipient; values of payloads are never read as names. A result answers the earliest open call
of its tool, so parallel calls find their own results; a user message closes all calls. Results without a call are
last. Keys that are not identifiers show as `*`, because some objects are keyed by data. At most 16 calls, results and
keys are shown, then `…`.

A conversation of ten messages with two calls takes 40 microseconds.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import orjson
from tokenmill.tasks.harmony.message import FUNCTIONS, ROLES, HarmonyMessage

Status = Literal["ok", "error", "empty", "missing"]
Answer = Literal["empty", "boxed", "code", "numeric", "json", "text"]
Shape = Literal["dict", "dict_empty", "list", "nonjson", "large", "missing"]

MOST_SHOWN = 16
LONGEST_CALL, LONGEST_RESULT = 20_000, 50_000
"""JSON with more characters is not parsed."""

PLAN_WORDS, PLAN_CHARACTERS = 128, 800
LONGEST_KEY = 64

CODE_TOOLS = frozenset({"python"})
"""Tools called with code instead of JSON."""

ERROR_KEYS = ("error", "errors", "exception", "traceback", "stderr")
"""Keys whose value, if any, describes an error."""

ERROR_FLAGS: tuple[tuple[str, frozenset[object]], ...] = (
    ("success", frozenset({False})),
    ("ok", frozenset({False})),
    ("is_error", frozenset({True})),
    ("isError", frozenset({True})),
    ("status", frozenset({"error", "failed", "failure"})),
)
"""Keys, and their values that report an error."""

NO_ERROR = frozenset({"", "none", "null", "false", "0", "ok", "no error", "no errors"})

ERROR_TEXT = re.compile(
    r"""^[ \t]*(?:
        traceback\ \(most\ recent\ call\ last\)
      | [\w.]*(?:error|exception)[ \t]*$                              # only a name
      | (?:[\w.]*(?:error|exception)|fatal|failed)\b[^:\n]{0,40}:     # a name and its message …
        (?![ \t]*[-+]?[.\d][\d.,e+-]*[ \t]*(?:%[ \t]*)?$)             # … which is not just a number, a margin of error
      | an\ error\ (?:has\ )?occurred
    )""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""A line that reports an error; not `no errors found` or `standard error: 0.3`."""

NUMBER = re.compile(r"[-+]?[$€£]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\s*%?|[-+]?\d+/\d+")
DRAWS_ON_TOOL = re.compile(r"tool output|based on the tool|according to the tool", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Payload:
    """The shape of a call's arguments or of a result, and the keys of an object."""

    shape: Shape
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(_shown(self.keys)) or self.shape


@dataclass(frozen=True, slots=True)
class Call:
    """A call: the tool without its namespace, and its arguments, None for code."""

    tool: str
    arguments: Payload | None

    def __str__(self) -> str:
        if self.arguments is None or self.arguments.shape == "dict_empty":
            return f"{self.tool}[]"
        return f"{self.tool}[{self.arguments}]"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call, or one without a call."""

    status: Status
    payload: Payload
    author: str


MISSING = Result("missing", Payload("missing"), "missing")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The actions in a conversation. `results` has one entry per call, in order, then results without a call."""

    calls: tuple[Call, ...]
    results: tuple[Result, ...]
    draws_on_tool: bool
    answer: Answer
    plan: str

    @property
    def tools(self) -> str:
        """The tools called, in order, as in the trace."""
        return _tools(self.calls)

    @property
    def structure(self) -> str:
        """The trace without its plan: equal for conversations that differ only in wording."""
        return _structure(self.calls, self.results, self.draws_on_tool, self.answer)

    @property
    def trace(self) -> str:
        """The whole trace."""
        return f"{self.structure}\nPLAN_EXCERPT: {self.plan or 'none'}"


@lru_cache(maxsize=4096)
def _structure(calls: tuple[Call, ...], results: tuple[Result, ...], draws_on_tool: bool, answer: Answer) -> str:
    lines = {
        "TOOL_SEQ": _tools(calls),
        "CALLS": str(len(calls)),
        "ARGS": _joined(calls),
        "RETURNS": _joined(result.status for result in results),
        "RET_KEYS": _joined(result.payload for result in results),
        "RET_ROLES": _joined(result.author for result in results),
        "USED_TOOL_OUTPUT": "yes" if draws_on_tool else "no",
        "ANSWER_TYPE": answer,
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _tools(calls: Iterable[Call]) -> str:
    return " -> ".join(_shown(call.tool for call in calls)) or "none"


def behaviour_of(messages: Sequence[HarmonyMessage]) -> Behaviour:
    """Return the behavior of a conversation."""
    asked, answers = _exchanges(messages)
    calls: list[Call] = []
    for message in asked:
        tool = (message.recipient or "unnamed").removeprefix(FUNCTIONS)
        is_code = message.recipient in CODE_TOOLS
        calls.append(Call(tool, None if is_code else _payload(_parsed(message.body, LONGEST_CALL))))
    results: list[Result] = []
    for message in answers:
        value = _parsed(message.body, LONGEST_RESULT) if message else None
        results.append(Result(_status(value, message.body), _payload(value), message.author) if message else MISSING)
    spoken = [message for message in messages if message.author == "assistant" and not is_call(message)]
    final = next((each.body for each in reversed(spoken) if each.channel in {"final", None}), "")
    draws = bool(results) and DRAWS_ON_TOOL.search(final) is not None
    # The plan is how the first thought begins, or else the first answer, on one line.
    first = next((message for message in spoken if message.channel == "analysis"), spoken[0] if spoken else None)
    words = first.body.split(maxsplit=PLAN_WORDS) if first else []
    plan = " ".join(words[:PLAN_WORDS])[:PLAN_CHARACTERS]
    return Behaviour(tuple(calls), tuple(results), draws, _answer(final), plan)


def is_call(message: HarmonyMessage) -> bool:
    """Return whether the assistant calls a tool in `message`."""
    return message.author == "assistant" and (message.recipient is not None or message.terminator == "call")


def _exchanges(messages: Iterable[HarmonyMessage]) -> tuple[list[HarmonyMessage], list[HarmonyMessage | None]]:
    """The calls, and their results in the same order, None if missing; then results without a call."""
    calls: list[HarmonyMessage] = []
    answers: list[HarmonyMessage | None] = []
    unasked: list[HarmonyMessage] = []
    waiting: list[int] = []
    for message in messages:
        if message.author == "user":  # what comes later answers no call from before
            waiting.clear()
        elif is_call(message):
            waiting.append(len(calls))
            calls.append(message)
            answers.append(None)
        elif message.author not in ROLES:
            # The earliest open call of this tool, so that parallel calls find their own results.
            number = next((each for each in waiting if calls[each].recipient == message.author), None)
            if number is None:
                unasked.append(message)
            else:
                waiting.remove(number)
                answers[number] = message
    return calls, [*answers, *unasked]


class _Unread:
    """Marks a value that was not parsed, with the reason."""

    def __init__(self, shape: Shape) -> None:
        self.shape: Shape = shape


NOT_JSON, TOO_LARGE = _Unread("nonjson"), _Unread("large")


def _parsed(body: str, longest: int) -> object:
    """The value of JSON text; NOT_JSON or TOO_LARGE if there is none."""
    if len(body) > longest:  # a page or a file, whose keys say nothing about what was done
        return TOO_LARGE
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return NOT_JSON


def _payload(value: object) -> Payload:
    if isinstance(value, _Unread):
        return Payload(value.shape)
    if isinstance(value, list):
        return Payload("list")
    if not isinstance(value, dict):
        return Payload("nonjson")
    # A key that isn't an identifier is most likely data.
    keys = {
        key if len(key) <= LONGEST_KEY and re.sub(r"[-.]", "_", key).isidentifier() else "*"
        for key in cast("dict[str, object]", value)
    }
    return Payload("dict", tuple(sorted(keys))) if keys else Payload("dict_empty")


def _status(value: object, body: str) -> Status:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if not fields:
            return "empty"
        errors = [fields.get(key) for key in ERROR_KEYS]
        # `{"error": "none"}` and `{"error": 0}` report success.
        is_error = any(
            each.strip().lower() not in NO_ERROR if isinstance(each, str) else bool(each) for each in errors
        ) or any(isinstance(fields.get(key), bool | str) and fields[key] in values for key, values in ERROR_FLAGS)
        return "error" if is_error else "ok"
    if isinstance(value, _Unread):  # plain text, or too long to parse
        return _status_of_text(body[:LONGEST_RESULT])
    if isinstance(value, str):
        return _status_of_text(value)
    return "empty" if value is None or value == [] else "ok"


def _status_of_text(text: str) -> Status:
    if not text.strip():
        return "empty"
    return "error" if ERROR_TEXT.search(text) else "ok"


def _answer(final: str) -> Answer:
    text = final.strip()
    if not text:
        return "empty"
    if "\\boxed" in text:  # before code and numbers, which an answer in a box may hold
        return "boxed"
    if "```" in text:
        return "code"
    if NUMBER.fullmatch(text):
        return "numeric"
    # `4` and `true` are JSON too, and say more as a number and as text.
    opens = text.startswith(("{", "["))
    return "json" if opens and not isinstance(_parsed(text, LONGEST_RESULT), _Unread) else "text"


def _joined(values: Iterable[object]) -> str:
    return " | ".join(_shown(map(str, values))) or "none"


def _shown(values: Iterable[str]) -> list[str]:
    listed = list(values)
    return listed if len(listed) <= MOST_SHOWN else [*listed[:MOST_SHOWN], "…"]


View = Literal["prompt", "reasoning_excerpt", "behavior"]

LONGEST_REASONING = 50_000
BLANK_LINE = "\n\n"


def view_of(messages: Sequence[HarmonyMessage], view: View) -> str:
    """Return the text to embed for a conversation; empty if it has none for this view.

    `prompt` is everything the user's text is; `reasoning_excerpt` the assistant's analysis up to 50,000 characters, else its
    answers, else any other text of it except calls; `behavior` the trace.
    """
    if view == "prompt":
        return _stripped(message.body for message in messages if message.author == "user")
    if view == "behavior":
        return behaviour_of(messages).trace
    spoken = [message for message in messages if message.author == "assistant" and not is_call(message)]
    thoughts = _stripped(message.body for message in spoken if message.channel == "analysis")
    answers = _stripped(message.body for message in spoken if message.channel in {"final", None})
    return (thoughts or answers or _stripped(message.body for message in spoken))[:LONGEST_REASONING]


def _stripped(bodies: Iterable[str]) -> str:
    return BLANK_LINE.join(filter(None, map(str.strip, bodies)))

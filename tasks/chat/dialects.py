"""Messages of other APIs, and agents' traces, in OpenAI's form.

| from | form |
|---|---|
| Anthropic | calls and results of tools are parts of a content: `tool_use` in an answer, `tool_result` in a user's message |
| LangChain | `type` is the role (human, ai, system, tool); in `messages_to_dict`, the rest is in `data` |
| others | `author` or `speaker` is the role |
| openai-harmony | reasoning on the channel `analysis`, calls with a `recipient`, text before them on `commentary`, the answer on `final` |
| ATIF (Harbor's RFC 1) | steps with `source`, `message`, `tool_calls` of `function_name`, `observation.results` |
| ADP (Agent Data Protocol) | `class_`: text_observation, message_action, api_action, code_action |
| OpenHands | events with an `action` and its `args`, or an `observation` and its `content` |
| SWE-agent | `history` of messages with `message_type`; steps with `response` and `observation`; Nebius' `role` and `text` |

The library openai-harmony (`Message.to_dict`, `Conversation.to_json`) has a message for every channel; here, those that make up
one turn are one message. Model, date and effort in its system message are up to a chat template, and counted
as not read. So is a call that an agent never got a result for before it went on: "calls without a result".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from .conversation import RejectionError
from .json_values import kind, quoted
from .messages import role_of

SPEAKER_KEYS = ("author", "speaker", "type")


def with_role(message: Any) -> Any:  # noqa: ANN401 - as in the row
    """Return the message with its role: its own, or that under a key of SPEAKER_KEYS."""
    if not isinstance(message, dict) or "role" in message:
        return message
    # A key counts only if its value is a role: `type` may be "message".
    name = next((key for key in SPEAKER_KEYS if isinstance(said := message.get(key), str) and role_of(said)), None)
    if name is None:
        return message
    inner = message.get("data") if name == "type" else None
    fields: dict[str, Any] = {**message, **inner, "data": None} if isinstance(inner, dict) else message
    older = fields.get("additional_kwargs")  # calls as the model's API wrote them
    return {**fields, **(older if isinstance(older, dict) else {}), "role": message[name], "type": None, name: None}


def unfolded(message: Any) -> Iterator[Any]:  # noqa: ANN401 - as in the row
    """Return the messages that Anthropic writes as one. Raises RejectionError for an answer that continues after a call."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or message.get("role") == "tool":  # whose list may be its result
        yield message
        return
    kinds = [_kind(part) for part in parts]
    if "tool_use" in kinds:
        # Templates write calls last, so a text behind a call would change places with it.
        first = kinds.index("tool_use")
        if set(kinds[first:]) != {"tool_use"}:
            raise RejectionError("not_text", "an answer continues after a tool_use; remove the row")
        calls = message.get("tool_calls") or parts[first:]
        yield {**message, "content": parts[:first] or None, "tool_calls": calls}
    elif "tool_result" in kinds:
        # Results and texts of one message alternate; each run becomes a message.
        for is_result, group in groupby(parts, lambda part: _kind(part) == "tool_result"):
            if is_result:
                for part in group:
                    content = part.get("content") or ""
                    types = map(_kind, content if isinstance(content, list) else [])
                    if other := [kind for kind in types if kind != "text"]:
                        why = f"a tool_result has the type {quoted(other[0])}; only 'text' can be read"
                        raise RejectionError("not_text", why)
                    yield {"role": "tool", "content": content, "tool_call_id": part.get("tool_use_id")}
            else:
                yield {**message, "content": list(group)}
    else:
        yield message


def _kind(part: Any) -> object:  # noqa: ANN401 - as in the row
    return part.get("type") if isinstance(part, dict) else None


Message = Mapping[str, Any]

FUNCTIONS = "functions."  # prefix of the recipients that are functions of the developer
OPEN = "open"  # the key of a turn that continues, with the value None, which counts as absent

HEADER = frozenset({"role", "name", "content", "channel", "recipient", "content_type"})
PREAMBLES = ("system_content", "developer_content")


def without_channels(messages: Sequence[Any], unread: set[str]) -> list[Any]:
    """Return the messages in OpenAI's form; what of them isn't read is added to `unread`.

    Raises RejectionError for channels that are unknown, and for several thoughts in a row.
    """
    made: list[Any] = []
    for number, message in enumerate(messages, 1):
        try:
            _read(message, made, unread)
        except (AttributeError, TypeError) as error:  # a part of another type than the library's
            wrong = f"message {number} of {len(messages)} isn't as openai-harmony writes it ({error})"
            raise RejectionError("bad_message", wrong) from error
    return made


def _read(message: object, made: list[Any], unread: set[str]) -> None:
    """Add a message to those before it."""
    if not isinstance(message, Mapping):
        made.append(message)
        return
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    generated = next((part for part in parts if isinstance(part, Mapping) and part.get("type") in PREAMBLES), None)
    if generated is not None and generated["type"] == "system_content":
        unread.add("system_content")
    elif generated is not None:
        spaces: Mapping[str, Any] = generated.get("tools") or {}
        tools = [tool for space in spaces.values() for tool in space.get("tools") or []]
        made.append({"role": "developer", "content": generated.get("instructions") or "", "tools": tools})
    elif message.get("role") == "assistant":
        _add(made, message)
    elif message.get("role") == "tool":
        named = str(message.get("name") or "").removeprefix(FUNCTIONS)
        made.append({**_rest(message), "role": "tool", "name": named, "content": message.get("content")})
    else:
        made.append({key: value for key, value in message.items() if key not in HEADER - {"role", "name", "content"}})


def _add(made: list[Any], message: Message) -> None:
    """Add a message by the assistant: to the turn before it, which an answer or a call ends."""
    channel, recipient = message.get("channel"), message.get("recipient")
    recipient = None if recipient == "all" else recipient
    if channel not in {None, "analysis", "commentary", "final"}:
        raise RejectionError("bad_message", f"it is on the channel {quoted(channel)}, which Harmony doesn't have")
    # The channel decides which field of the turn a text is.
    part, content = _rest(message), message.get("content")
    if recipient:
        function = {"name": recipient.removeprefix(FUNCTIONS), "arguments": _text(content)}
        part["tool_calls"] = [{"type": "function", "function": function}]
    elif channel == "analysis":
        part["reasoning_content"] = _text(content)
    else:
        part["content"] = content
    before = made[-1] if made else None
    # A turn goes on until an answer or a call closes it.
    if not isinstance(before, dict) or before.get("role") != "assistant" or OPEN not in before:
        before = {"role": "assistant", "content": None, OPEN: None}
        made.append(before)
    if twice := [name for name in part if before.get(name) is not None]:
        raise RejectionError("reasoning_twice", f"the turn has two texts on {channel} ({twice[0]}); join them")
    before.update(part)
    if recipient or channel in {None, "final"}:
        del before[OPEN]


def _rest(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in HEADER and value is not None}


def _text(content: object) -> object:
    """The text of a content, if all its parts are texts."""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    given = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in given if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(given) else content


Step = Mapping[str, Any]

STALLED = "calls without a result"


def trace_name(first: object) -> str | None:
    """Return the trace format that begins with `first`; None for messages."""
    if isinstance(first, list):
        first = first[0] if first else None
    if not isinstance(first, Mapping):
        return None
    return next((name for name, (is_first, _) in TRACES.items() if is_first(first)), None)


def read_trace(name: str, steps: Sequence[Any], unread: set[str]) -> list[dict[str, Any]]:
    """Return the messages of a trace; what of it isn't read is added to `unread`. Raises RejectionError for a step of no known form."""
    # OpenHands has pairs of an action and its observation.
    flat = [each for step in steps for each in (step if isinstance(step, list) else [step])]
    made: list[dict[str, Any]] = []
    for number, step in enumerate(flat, 1):
        if not isinstance(step, Mapping):
            raise RejectionError("bad_message", f"step {number} of {len(flat)} is {kind(step)}; make it an object")
        try:
            made += TRACES[name][1](step, made, unread)
        except (AttributeError, KeyError, TypeError, IndexError) as error:  # a part of another type than the form's
            wrong = f"step {number} of {len(flat)} isn't of the form of {name} ({error}); leave the row out"
            raise RejectionError("bad_message", wrong) from error
    open_calls = 0
    for message in made:
        if message["role"] == "tool":
            open_calls -= 1
        elif open_calls > 0:  # the agent went on before it got a result
            unread.add(STALLED)
            break
        else:
            open_calls = len(message.get("tool_calls") or ())
    return made


def _calling(content: object, name: object, arguments: object, identifier: object = None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content or None, "tool_calls": [{**call, "id": identifier}]}


def _is_open(made: Sequence[Step]) -> bool:
    """Whether the last message makes a call that waits for its result."""
    return bool(made) and bool(made[-1].get("tool_calls"))


def _atif(step: Step, _made: Sequence[Step], unread: set[str]) -> Iterator[dict[str, Any]]:
    source, results = step.get("source"), (step.get("observation") or {}).get("results") or []
    if source not in {"system", "user", "agent"}:
        raise RejectionError("unknown_role", f"step {step.get('step_id')}: its source is {quoted(source)}")
    message: dict[str, Any] = {"role": "assistant" if source == "agent" else source, "content": step.get("message")}
    for name in ("reasoning_content", "tool_calls"):
        if step.get(name):
            message[name] = step[name]
    if "tool_calls" in message:
        message["tool_calls"] = [
            {
                "id": call.get("tool_call_id"), "type": "function",
                "function": {"name": call.get("function_name"), "arguments": call.get("arguments")},
            }
            for call in message["tool_calls"]
        ]  # fmt: skip
    # The context of a subagent, learned in its own trajectory.
    if step.get("is_copied_context") and source == "agent":
        message["train"] = False
    yield message
    for result in results:
        if result.get("subagent_trajectory_ref"):
            unread.add("subagent_trajectory_ref")
        if source != "agent" or not step.get("tool_calls"):
            unread.add("observations without a call")
        else:
            yield {
                "role": "tool", "content": result.get("content") or "", "tool_call_id": result.get("source_call_id")
            }  # fmt: skip


def _adp(step: Step, made: Sequence[Step], _unread: set[str]) -> Iterator[dict[str, Any]]:
    said, content = step.get("description"), step.get("content")
    match step.get("class_"):
        case "text_observation":
            role = "user" if step.get("source") == "user" or not _is_open(made) else "tool"
            yield {"role": role, "content": content}
        case "message_action":
            yield {"role": "assistant", "content": f"{said}\n\n{content}" if said else content}
        case "api_action":
            yield _calling(said, step.get("function"), step.get("kwargs"))
        case "code_action":
            yield _calling(said, step.get("language"), {"code": content})
        case other:
            raise RejectionError("not_text", f"a step of the class {quoted(other)} can't be read; leave the row out")


KEPT_APART = frozenset({"thought", "blocking", "hidden", "confirmation_state", "is_confirmed", "security_risk", "is_input",
                        "keep_prompt", "translated_ipython_code", "timeout", "wait_for_response"})  # fmt: skip
"""Arguments of OpenHands' actions that the agent itself doesn't write."""

SILENT = frozenset({"agent_state_changed", "change_agent_state", "null", "recall", "condensation", "condense"})
"""Events of OpenHands that no model sees."""


def _openhands(step: Step, made: Sequence[Step], unread: set[str]) -> Iterator[dict[str, Any]]:
    action, seen = step.get("action"), step.get("observation")
    args: dict[str, Any] = step.get("args") or {}
    said = args.get("content") or args.get("thought") or args.get("final_thought") or step.get("message")
    if action in SILENT or seen in SILENT:
        unread.add(f"events: {action or seen}")
    elif seen:
        if _is_open(made):
            yield {"role": "tool", "content": step.get("content") or "", "tool_call_id": _made_call(step).get("id")}
        else:
            unread.add("observations without a call")
    elif action == "system":
        yield {"role": "system", "content": args.get("content"), "tools": args.get("tools")}
    elif step.get("source") == "user":
        yield {"role": "user", "content": said}
    elif action == "message" or (action == "finish" and not _made_call(step)):
        yield {"role": "assistant", "content": said}
    else:
        # Without the model's own call, the action's arguments are the nearest to it.
        own = {name: value for name, value in args.items() if name not in KEPT_APART and value is not None}
        call = _made_call(step)
        arguments = call.get("arguments") or own
        yield _calling(args.get("thought"), call.get("name") or action, arguments, call.get("id"))


def _made_call(step: Step) -> dict[str, Any]:
    """`name`, `arguments` and `id` of the model's own call that an event records; empty if it doesn't."""
    facts: dict[str, Any] = step.get("tool_call_metadata") or {}
    if not facts:
        return {}
    choices = (facts.get("model_response") or {}).get("choices") or [{}]
    calls = ((choices[0].get("message") or {}).get("tool_calls")) or []
    own = next((each for each in calls if each.get("id") == facts.get("tool_call_id")), {})
    arguments = (own.get("function") or {}).get("arguments")
    return {"name": facts.get("function_name"), "arguments": arguments, "id": facts.get("tool_call_id")}


def _swe_agent_message(step: Step, _made: Sequence[Step], _unread: set[str]) -> Iterator[dict[str, Any]]:
    """A message; `thought` and `action` are parsed from its content, and demonstrations aren't the agent's own."""
    message = {name: step[name] for name in ("role", "content", "tool_calls", "thinking_blocks") if step.get(name)}
    if step.get("tool_call_ids"):
        message["tool_call_id"] = step["tool_call_ids"][0]
    if step.get("is_demo") and step.get("role") == "assistant":
        message["train"] = False
    yield {"content": None if message.get("tool_calls") else "", **message}


def _swe_agent_step(step: Step, made: Sequence[Step], _unread: set[str]) -> Iterator[dict[str, Any]]:
    if not made:
        yield from [dict(each) for each in step.get("query") or []]
    yield {"role": "assistant", "content": step.get("response")}
    if step.get("observation"):
        yield {"role": "user", "content": step["observation"]}


def _nebius(step: Step, _made: Sequence[Step], _unread: set[str]) -> Iterator[dict[str, Any]]:
    if step["role"] == "ai" and step.get("mask"):
        # Whether `mask` excludes a message or includes it differs between trainers.
        raise RejectionError("bad_loss_flag", "mask is true in an answer; write train: false instead")
    yield {"role": step["role"], "content": step.get("text") or step.get("system_prompt")}


Read = Callable[[Step, Sequence[Step], set[str]], Iterator[dict[str, Any]]]
TRACES: Mapping[str, tuple[Callable[[Step], bool], Read]] = {
    "ATIF trajectory": (lambda step: "source" in step and "message" in step and "action" not in step, _atif),
    "ADP trajectory": (lambda step: "class_" in step, _adp),
    "OpenHands events": (
        lambda step: "role" not in step and "response" not in step and bool({"action", "observation"} & step.keys()),
        _openhands,
    ),
    "SWE-agent history": (lambda step: "role" in step and "message_type" in step, _swe_agent_message),
    "SWE-agent steps": (lambda step: "response" in step and "observation" in step, _swe_agent_step),
    "SWE-agent texts": (lambda step: "role" in step and "cutoff_date" in step, _nebius),
}
"""Trace formats: how the first step is recognized, and how a step is read, given the messages before it."""

"""Agents' traces as messages: calls with their results, in the forms that agents record.

| trace | its steps |
|---|---|
| ATIF (Harbor's RFC 1) | `source`, `message`, `tool_calls` of `function_name`, `observation.results` |
| ADP (Agent Data Protocol) | `class_`: text_observation, message_action, api_action, code_action |
| OpenHands | events with an `action` and its `args`, or an `observation` and its `content` |
| SWE-agent | `history` of messages with `message_type`; steps with `response` and `observation`; Nebius' `role` and `text` |

A call that the agent never got a result for, and went on, is counted as not read: "calls without a result".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .conversation import RejectionError
from .json_values import kind, quoted

Step = Mapping[str, Any]

STALLED = "calls without a result"


def trace_name(first: object) -> str | None:
    """The kind of trace that begins with `first`; None for messages."""
    if isinstance(first, list):
        first = first[0] if first else None
    if not isinstance(first, Mapping):
        return None
    return next((name for name, (is_first, _) in TRACES.items() if is_first(first)), None)


def read_trace(name: str, steps: Sequence[Any], unread: set[str]) -> list[dict[str, Any]]:
    """The messages of a trace; what of it isn't read is added to `unread`. Raises RejectionError for a step of no known form."""
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
    if _stalled(made):
        unread.add(STALLED)
    return made


def _stalled(messages: Sequence[Step]) -> bool:
    """Whether a message follows calls of which one has no result."""
    open_calls = 0
    for message in messages:
        if message["role"] == "tool":
            open_calls -= 1
        elif open_calls > 0:
            return True
        else:
            open_calls = len(message.get("tool_calls") or ())
    return False


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
        message["tool_calls"] = [_atif_call(call) for call in message["tool_calls"]]
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


def _atif_call(call: Step) -> dict[str, Any]:
    function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
    return {"id": call.get("tool_call_id"), "type": "function", "function": function}


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
        raise RejectionError("bad_loss_flag", "it says mask is true of an answer; write train: false instead")
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
"""The kinds of traces: how the first step is recognized, and how a step is read, given the messages before it."""

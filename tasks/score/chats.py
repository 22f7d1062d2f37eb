"""Harmony messages as a chat, for models with other templates.

What Harmony spreads over messages is one turn elsewhere: thoughts become reasoning, calls tool calls, remarks and the
answer the content. The system message is Harmony's own (identity, effort, channels) and says nothing to other models; the
developer's becomes the system message as it is, declarations of tools included, because rows hold these as text only.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenmill.tasks.harmony.message import FUNCTIONS, HarmonyMessage

INSTRUCTIONS = "# Instructions\n\n"


def chat_of(messages: Sequence[HarmonyMessage]) -> dict[str, Any]:
    """A record with `messages` in the form of OpenAI."""
    turns = itertools.groupby(messages, key=lambda message: message.author)
    return {"messages": [said for author, each in turns for said in _said(author, list(each))]}


def _said(author: str, messages: list[HarmonyMessage]) -> Iterable[dict[str, Any]]:
    """What messages in a row by the same author become."""
    if author == "system":
        return []
    if author == "assistant":
        return (_turn(steps) for steps in _turns(messages))
    if author in {"developer", "user"}:
        role = "system" if author == "developer" else author
        return ({"role": role, "content": message.body.removeprefix(INSTRUCTIONS)} for message in messages)
    return ({"role": "tool", "name": author.removeprefix(FUNCTIONS), "content": message.body} for message in messages)


def _turns(messages: Iterable[HarmonyMessage]) -> Iterable[list[HarmonyMessage]]:
    """Messages up to an answer, one turn each; calls in a row stay together."""
    turn: list[HarmonyMessage] = []
    for message in messages:
        turn.append(message)
        if message.channel == "final":
            yield turn
            turn = []
    if turn:
        yield turn


def _turn(messages: Sequence[HarmonyMessage]) -> dict[str, Any]:
    calls = [message for message in messages if message.recipient is not None]
    said = [message for message in messages if message.recipient is None]
    thoughts = [message.body for message in said if message.channel == "analysis"]
    content = "\n".join(message.body for message in said if message.channel != "analysis")
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = [_call(message.recipient or "", message.body) for message in calls]
    return turn


def _call(recipient: str, body: str) -> Mapping[str, Any]:
    """A call; what is no JSON object is the code that a built-in tool runs."""
    try:
        arguments = body if isinstance(json.loads(body), dict) else json.dumps({"code": body}, ensure_ascii=False)
    except (ValueError, RecursionError):  # no JSON, a number of too many digits, or nested too deeply
        arguments = json.dumps({"code": body}, ensure_ascii=False)
    return {"type": "function", "function": {"name": recipient.removeprefix(FUNCTIONS), "arguments": arguments}}

"""What of a conversation is embedded: the question, the reasoning, or the behaviour.

* `prompt`: all that the user says.
* `reasoning_excerpt`: what the assistant thinks, up to 50,000 characters; where it does not think, its answers; where
  there are none, whatever it says that is no call.
* `behavior`: the trace of `signature`.

Texts are stripped and joined with a blank line. A view may be empty, and then there is nothing to embed.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from tokenmill.tasks.harmony.message import HarmonyMessage

from .signature import behaviour_of, is_call

View = Literal["prompt", "reasoning_excerpt", "behavior"]

LONGEST_REASONING = 50_000
BLANK_LINE = "\n\n"


def view_of(messages: Sequence[HarmonyMessage], view: View) -> str:
    """The text that is embedded for a conversation, empty where the view shows nothing."""
    if view == "prompt":
        return _joined(message.body for message in messages if message.author == "user")
    if view == "reasoning_excerpt":
        return _reasoning(messages)[:LONGEST_REASONING]
    return behaviour_of(messages).trace


def _reasoning(messages: Sequence[HarmonyMessage]) -> str:
    """The text of the best kind of message that says anything at all."""
    spoken = [message for message in messages if message.author == "assistant" and not is_call(message)]
    thoughts = _joined(message.body for message in spoken if message.channel == "analysis")
    answers = _joined(message.body for message in spoken if message.channel in {"final", None})
    return thoughts or answers or _joined(message.body for message in spoken)


def _joined(bodies: Iterable[str]) -> str:
    return BLANK_LINE.join(filter(None, map(str.strip, bodies)))

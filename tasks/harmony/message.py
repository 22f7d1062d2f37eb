"""One Harmony message: who speaks, to whom, on which channel, what, and how it ends.

    <|start|>AUTHOR to=RECIPIENT<|channel|>CHANNEL <|constrain|>TYPE<|message|>BODY<|end|>

The record is what every part of this room hands on: converters compose it, the renderer writes it, the parser reads it
back. It holds what is written and nothing else, so messages that are equal are written the same. It does not check
itself: `render` refuses what cannot be written and `faults` judges what was. A message costs 1.6 microseconds and 90
bytes beside its strings.
"""

from dataclasses import dataclass, field
from typing import Literal

Terminator = Literal["end", "call", "return"]
"""How a message ends: normally, by calling its recipient, or as the last token of a training target."""

ROLES = frozenset({"system", "developer", "user", "assistant"})
"""The authors that are no tools. A tool stands under its own name, such as `functions.get_order` or `python`."""

CHANNELS = ("analysis", "commentary", "final")
"""Private reasoning and calls of built-in tools; calls of functions and remarks between them; the answer."""

FUNCTIONS = "functions."
"""What the name of a developer's function begins with, as recipient and as author."""


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """A message. `author` is a role or a tool's name; `content_type` says what `body` is, such as json, and
    `constrained` whether `<|constrain|>` stands before it (it says nothing where there is no content type). `trained` is
    no part of what is written: false where the data keeps the message from being trained on.
    """

    author: str
    body: str
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    constrained: bool = True
    terminator: Terminator = "end"
    trained: bool = field(default=True, compare=False)

"""Thinking inside of contents, between `<think>` and `</think>`: a part of the content unless the template reads reasoning apart.

A template that does not write `reasoning_content` gets contents byte for byte, as transformers gives them to it. For a template
that writes it, thinking that begins a content becomes reasoning, because then its mask is known. Probes find out which
(`probes`). Elsewhere in a content the tags are text.
"""

from dataclasses import replace
from typing import Literal

from .conversation import Conversation, Message, Rejected, RejectionError, without

OPEN, CLOSE = "<think>", "</think>"

Inline = Literal["content", "dropped", "opened", "closed", "split"]
"""What becomes of thinking that begins a content.

`content`: it stays; `opened`: it is read apart after `<think>`; `closed`: also without that tag; `split`: as `closed`, and the
template does the same, but looks for the innermost tags; `dropped`: as `split`, and the template leaves it out.
"""


def apart(conversation: Conversation, inline: Inline) -> Conversation | Rejected:
    """The conversation with inline thinking as reasoning, where the template reads it so; Rejected if that is ambiguous."""
    messages = conversation.messages
    if not any(has_tag(message) for message in messages):
        return conversation
    if inline == "content":
        return replace(conversation, messages=[_unended(message) for message in messages])
    found: list[Message] = []
    for number, message in enumerate(messages, 1):
        try:
            found.append(_apart(message, inline) if has_tag(message) else message)
        except RejectionError as error:
            return Rejected(error.reason, f"message {number} of {len(messages)} ('assistant'): {error.detail}")
    return replace(conversation, messages=found)


def _unended(message: Message) -> Message:
    """The message, which isn't trained on its first `</think>` if a budget ended its thinking."""
    content = message["content"] or ""
    if not message.get("cut") or CLOSE not in content:
        return message
    start = content.index(CLOSE)
    ranges = message.get("trained", ((0, len(content)),))
    return {**message, "trained": tuple(without(ranges, start, start + len(CLOSE)))}


def has_tag(message: Message) -> bool:
    """Whether an answer contains a tag. Most contents have no `<`, which takes a fifth of the time to find."""
    content = message["content"]
    return (
        message["role"] == "assistant"
        and content is not None
        and "<" in content
        and (OPEN in content or CLOSE in content)
    )


def _apart(message: Message, inline: Inline) -> Message:
    content = message["content"] or ""
    thoughts, answer = _split(content, inline)
    if answer == content:
        return message
    if thoughts and "reasoning_content" in message:
        raise RejectionError("reasoning_twice", "it has reasoning under a key and inline in its content; keep one")
    if message.get("trained"):
        wrong = (
            "it says which characters to train on, and its content includes thinking; move that to reasoning_content"
        )
        raise RejectionError("bad_loss_flag", wrong)
    made: Message = {**message, "content": answer}
    return {**made, "reasoning_content": thoughts} if thoughts else made


def _split(content: str, inline: Inline) -> tuple[str | None, str]:
    """Inline thinking, None if absent or blank, and the answer after it. A closing tag alone, within a line, is text.

    Raises RejectionError for unterminated thinking, and for tags that occur again.
    """
    opened = content.lstrip().startswith(OPEN)
    thoughts, ended, answer = content.partition(CLOSE)
    if opened and not ended:
        raise RejectionError("unclosed_think", f"its content opens {OPEN} and never closes it; was it cut short?")
    in_sentence = inline in {"split", "dropped"} and answer[:1] not in {"", "\n"}
    if not ended or not (opened or (inline != "opened" and OPEN not in thoughts and not in_sentence)):
        return None, content
    answer = answer if inline == "dropped" else answer.lstrip("\n")
    before, again, _ = answer.partition(CLOSE)
    if answer.lstrip().startswith(OPEN) or (again and (inline in {"split", "dropped"} or OPEN not in before)):
        raise RejectionError("reasoning_twice", f"thinking follows its first {CLOSE} again")
    thoughts = (thoughts.lstrip().removeprefix(OPEN) if opened else thoughts).strip("\n")
    if inline == "split" and OPEN in thoughts:
        raise RejectionError("reasoning_twice", f"its thinking has {OPEN} again, where the chat template would cut it")
    return thoughts if thoughts.strip() else None, answer

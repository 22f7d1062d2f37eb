"""The shapes in which public datasets have preferences, as a prompt with a chosen and a rejected answer.

| shape | fields |
|---|---|
| pairs (TRL) | `prompt`, or `question` or `instruction` and `input`, also `system`; `chosen`, `rejected` |
| conversations (TRL, UltraFeedback) | `chosen` and `rejected`, which begin alike |
| dialogues (Anthropic's hh-rlhf) | the same as texts of `Human:` and `Assistant:` |
| ms-swift | `messages` with the chosen answer, `rejected_response` or `rejected_messages` |
| LLaMA-Factory | `conversations` before the answers, `chosen` and `rejected` with `from` and `value` |

The transforms read the first two, so such rows remain unchanged.
"""

import re
from typing import Any

from tokenmill.tasks.chat.messages import role_of

from .rows import Record

SAID = re.compile(r"\n\n(Human|Assistant):")
QUESTIONS = ("question", "instruction")
ANSWERS = ("chosen", "rejected")


def one_form(record: Record) -> Record:
    """Return the record with `chosen`, `rejected` and perhaps `prompt`; the same object if it has them, or no known shape."""
    if isinstance(record.get("messages"), list) and (rejected := _rejected(record)):
        return {"chosen": record["messages"], "rejected": rejected}
    if any(record.get(name) is None for name in ANSWERS):
        return record
    answers = {name: _dialogue(record[name]) for name in ANSWERS}
    if isinstance(record.get("conversations"), list):
        return {"prompt": [_message(turn) for turn in record["conversations"]], **answers}
    # Of the names for a question, `prompt` is TRL's own.
    asked = record.get("prompt") or next((record[name] for name in QUESTIONS if record.get(name)), None)
    if isinstance(asked, str) and "prompt" not in record and record.get("input"):
        asked = f"{asked}\n{record['input']}"
    if record.get("system") and isinstance(asked, str):
        asked = [{"role": "system", "content": record["system"]}, {"role": "user", "content": asked}]
    # A row that has this form already keeps its bytes, and fields that aren't read.
    changed = {**answers, **({} if asked is None else {"prompt": asked})}
    return record if all(record.get(name) == value for name, value in changed.items()) else changed


def _rejected(record: Record) -> list[Any] | None:
    """ms-swift's other answer, after the same messages."""
    if record.get("rejected_messages"):
        return record["rejected_messages"]
    answer = record.get("rejected_response")
    if isinstance(answer, str) and answer:
        return [*record["messages"][:-1], {"role": "assistant", "content": answer}]
    return answer if isinstance(answer, list) and answer else None


def _dialogue(answer: Any) -> Any:  # noqa: ANN401 - not checked yet
    """An answer as messages, if it is a turn, turns or a dialogue as text."""
    if isinstance(answer, str) and answer.startswith("\n\nHuman:"):
        _, *parts = SAID.split(answer)  # speakers and texts in turn
        roles = {"Human": "user", "Assistant": "assistant"}
        return [
            {"role": roles[who], "content": text.strip()} for who, text in zip(parts[::2], parts[1::2], strict=True)
        ]
    if isinstance(answer, dict):
        return [_message(answer)]
    return [_message(turn) for turn in answer] if isinstance(answer, list) else answer


def _message(turn: Any) -> Any:  # noqa: ANN401 - not checked yet
    """A turn of ShareGPT as a message; anything else as it is."""
    if not isinstance(turn, dict) or turn.get("role") is not None or not isinstance(turn.get("from"), str):
        return turn
    return {"role": role_of(turn["from"]) or turn["from"], "content": turn.get("value")}

"""What data itself says about the loss: messages, or parts of their text, that are not to be trained on.

| key | of | value |
|---|---|---|
| `weight` | OpenAI's fine-tuning API, older ShareGPT data | 0 or 1 |
| `train` | axolotl | true or false |
| `train_detail` | axolotl | `[{"begin_offset", "end_offset", "train"}, …]`, characters of the content, the end included |
| `step_loss_mask` | slime | 0 or 1 |

axolotl's parts of content carry `train` or `weight` as well. A message is left out where any of its flags says so. With
a detail, the characters that it names are trained on and the end of the turn, and nothing else of the message. Flags
can only leave out: what others than the assistant say is never trained on, and data that asks for it is rejected.
"""

from collections.abc import Mapping
from typing import Any

from .conversation import Range, RejectionError, Role
from .json_values import kind

WHOLE = ("weight", "train", "step_loss_mask")
DETAIL = "train_detail"

NOTHING: tuple[Range, ...] = ()


def trained_characters(fields: Mapping[str, Any], role: Role, content: str | None) -> tuple[Range, ...] | None:
    """The characters of `content` that may be trained on, as ranges in order; none at all leave out the whole message.
    None where the data says nothing against any of it.

    `fields` is the message as its source gave it, `content` its text. Raises RejectionError for flags that cannot be
    read or followed.
    """
    flags = [flag for name in WHOLE if (flag := _flag(fields, name)) is not None]
    detail = _of_parts(fields.get("content"))
    if detail is None:
        detail = _of_detail(fields.get(DETAIL))
    if role != "assistant":
        if fields.get("train") or detail:
            raise _bad("asks to be trained on, and only the assistant's messages are; remove train and train_detail")
        return None
    if not all(flags):
        return NOTHING
    if detail is None:
        return None
    if _given(fields.get("content")) != (content or ""):
        raise _bad("says which characters to train on, and thinking stands among them; put it under reasoning_content")
    return _joined(detail, len(content or ""))


def _given(content: object) -> str:
    """The text of a content, which has been read before, in whatever form it is given."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text")) for part in content)
    return content if isinstance(content, str) else ""


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or value not in (0, 1):
        raise _bad(f"says {name} is {value if isinstance(value, int | float) else kind(value)}; make it 0 or 1")
    return bool(value)


def _of_parts(content: object) -> list[Range] | None:
    """The ranges of the parts that are trained on, None where no part says anything."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if not any(_part_flags(part) for part in parts):
        return None
    ranges: list[Range] = []
    place = 0
    for part in content if isinstance(content, list) else []:
        text = part if isinstance(part, str) else str(part.get("text"))
        if isinstance(part, str) or all(_part_flags(part)):
            ranges.append((place, place + len(text)))
        place += len(text)
    return ranges


def _part_flags(part: Mapping[str, Any]) -> list[bool]:
    return [flag for name in ("weight", "train") if (flag := _flag(part, name)) is not None]


def _of_detail(detail: object) -> list[Range] | None:
    if detail is None:
        return None
    if not isinstance(detail, list):
        raise _bad(f"says {DETAIL} is {kind(detail)}; make it an array of begin_offset, end_offset and train")
    entries = [_entry(each, number) for number, each in enumerate(detail, 1)]
    return [(begin, end) for begin, end, train in entries if train]


def _entry(entry: object, number: int) -> tuple[int, int, bool]:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    begin, end, train = (fields.get(name) for name in ("begin_offset", "end_offset", "train"))
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end or not isinstance(train, bool):
        shape = '{"begin_offset": 0, "end_offset": 9, "train": true}'
        raise _bad(f"has a {DETAIL} whose entry {number} is not of the form {shape}")
    return begin, end + 1, train


def _joined(ranges: list[Range], size: int) -> tuple[Range, ...]:
    """Ranges in order, within `size` characters, neighbours in one."""
    made: list[Range] = []
    for start, stop in sorted((start, min(stop, size)) for start, stop in ranges if start < size):
        if made and start <= made[-1][1]:
            start, stop = made[-1][0], max(made.pop()[1], stop)  # noqa: PLW2901 - grown to the left
        if start < stop:
            made.append((start, stop))
    return tuple(made)


def _bad(what: str) -> RejectionError:
    return RejectionError("bad_loss_flag", f"it {what}")

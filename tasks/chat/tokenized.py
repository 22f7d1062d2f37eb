"""Rows that are already tokenized: their ids are stored unchanged, and masks next to them select the trained ones.

| ids | masks |
|---|---|
| `input_ids` | `labels` (the id, or -100 where it isn't trained on), `loss_mask`, TRL's `completion_mask` and `assistant_masks` (0 or 1) |
| prime-rl's `prompt_ids` and `completion_ids` | `prompt_mask` and `completion_mask` |

An entry of a mask is for the id at its own position, not for the next one. With several masks, an id is trained on if all of them
mark this, as in TRL. Padding and packs are rejected, because a row is stored as one sequence.
"""

import numpy as np

from .conversation import RejectionError, rejecting
from .encoding import Tokenized
from .json_values import kind, quoted
from .parse import unread_beside
from .shapes import MASKS, Given, Record, layout_of

UNTRAINED = -100  # the label of an id that isn't trained on

BINARY, LABELS = range(2), range(UNTRAINED, 1 << 31)


@rejecting
def tokenized(record: Record, vocabulary_size: int, tools_field: str, given: Given) -> Tokenized:
    """Return the sequence in a record of the shape TOKENIZED; Rejected if ids or masks are wrong, or nothing is trained on."""
    fields = {name.lower(): value for name, value in record.items() if value is not None}
    layout = layout_of(record, None, tools_field, given)
    beside = [name for name in (*layout.systems, *layout.tools) if record.get(name)]
    unread = tuple(sorted({*unread_beside(record, layout), *beside}))
    if "prompt_mask" in layout.shape.beside:
        parts = [(f"{part}_ids", [f"{part}_mask"]) for part in ("prompt", "completion")]
    else:
        parts = [("input_ids", [name for name in MASKS if name in fields])]
    read: list[tuple[np.ndarray, np.ndarray]] = []
    for name, masks in parts:
        ids = _integers(fields, name, range(vocabulary_size))
        if name == "input_ids" and "seq_start_id" in fields:
            raise _bad("it has seq_start_id, so it is a pack; make each sequence a row, with a mask that isn't shifted")
        if name == "input_ids" and "attention_mask" in fields:
            real = _mask(fields, "attention_mask", name, ids)
            if not real.all():
                raise _bad(f"attention_mask[{np.argmin(real)}] is 0; remove padding from the row")
        # As in TRL, an id is trained on if all masks mark it.
        read.append((ids, np.logical_and.reduce([_mask(fields, mask, name, ids) for mask in masks])))
    ids, trained = (np.concatenate(each) for each in zip(*read, strict=True))
    # The first id has no context to be predicted from.
    if not trained[1:].any():
        raise RejectionError("nothing_trained", f"of its {len(ids):,} ids, none after the first is trained on")
    return Tokenized(ids.astype(np.int32), trained.astype(np.int8), unread)


def _mask(fields: Record, mask: str, name: str, ids: np.ndarray) -> np.ndarray:
    """Whether a mask has each of the `ids` in the field `name` trained on."""
    labels = mask == "labels"
    values = _integers(fields, mask, LABELS if labels else BINARY)
    if len(values) != len(ids):
        raise _bad(f"{mask} has {len(values):,} entries, but {name} has {len(ids):,}; make it one for each id")
    if not labels:
        return values == 1
    wrong = (values != UNTRAINED) & (values != ids)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise _bad(
            f"labels[{place}] is {values[place]}, but {name}[{place}] is {ids[place]}; make it the same, or {UNTRAINED}"
        )
    return values != UNTRAINED


def _integers(fields: Record, name: str, allowed: range) -> np.ndarray:
    """The list in a field, int64. Raises RejectionError, with the position and value, for one that isn't `allowed`."""
    values = fields[name]
    if not isinstance(values, list):
        raise _bad(f"{name} is {kind(values)}; make it an array of integers")
    # Parquet may have masks as booleans or floats.
    types = {int, bool, float} if allowed == BINARY else {int}
    # A look at each distinct value only; the slow search for the fault is for bad rows.
    if set(map(type, values)) <= types and all(value in allowed for value in set(values)):
        return np.array(values, np.int64)
    place = next(n for n, value in enumerate(values) if type(value) not in types or value not in allowed)
    value = values[place]
    shown = str(value)[:20] if isinstance(value, int | float) else quoted(value)
    raise _bad(f"{name}[{place}] is {shown}; integers from {allowed.start} to {allowed[-1]} are allowed there")


def _bad(detail: str) -> RejectionError:
    return RejectionError("bad_tokens", detail)

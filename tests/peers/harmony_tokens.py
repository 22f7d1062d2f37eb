"""The tokens of a conversation as the reference library gives them, and where each message and its body lie."""

from dataclasses import dataclass

import numpy as np
from tokenmill.tasks.harmony.render import TAGS, render
from tokenmill.tasks.harmony.vocabulary import IDS, encoding


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a conversation: `ids` int32 [tokens]; message i is ids[offsets[i]:offsets[i + 1]], `offsets` int64
    [messages + 1]; its body begins at ids[bodies[i]], `bodies` int64 [messages], and ends one before the message does.
    """

    ids: np.ndarray
    offsets: np.ndarray
    bodies: np.ndarray


def encode(messages):
    """The tokens of `render(messages)`. Raises InputError as it does."""
    ids = np.asarray(encoding().encode(render(messages), allowed_special=TAGS, disallowed_special=()), np.int32)
    starts = np.flatnonzero(ids == IDS["<|start|>"])
    return Encoded(ids, np.append(starts, len(ids)), np.flatnonzero(ids == IDS["<|message|>"]) + 1)


SPECIAL_STRINGS = frozenset({
    *IDS, "<|endofprompt|>", *(f"<|reserved_{number}|>" for number in set(range(200000, 201089)) - set(IDS.values()))
})  # fmt: skip
"""The 1,092 spellings of special tokens; <|endofprompt|> is tiktoken's name of token 200018."""

"""How many tokens rows have, a batch at a time.

Message by message, because what a model says is counted apart, and messages encoded one by one are the conversation
encoded whole: every message begins with a control token. A batch is one call of the encoder, some 150 MB/s, where the
reference takes 0.2 ms per KB.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .grammar import ParsedMessage

VOCABULARY = "o200k_harmony"


@cache
def harmony_encoder() -> Encoder:
    """The encoder of Harmony text, which knows its control tokens."""
    return exact_encoder(find_vocabulary(TokenizerSource(model=VOCABULARY)), literal=False)


def token_counts(conversations: Sequence[tuple[str, Sequence[ParsedMessage]]]) -> tuple[np.ndarray, np.ndarray]:
    """Of each text, parsed as these messages: its tokens, and those of the messages by the assistant, headers and ends
    included; both int64 [conversations].
    """
    messages = [message for _, found in conversations for message in found]
    texts = [text[message.start : message.end] for text, found in conversations for message in found]
    owners = np.repeat(np.arange(len(conversations)), [len(found) for _, found in conversations])
    lengths = harmony_encoder().encode(pa.array(texts, pa.large_string())).lengths
    spoken = lengths * np.asarray([message.author == "assistant" for message in messages], np.int64)
    whole, completion = (np.bincount(owners, each, len(conversations)) for each in (lengths, spoken))
    return whole.astype(np.int64), completion.astype(np.int64)

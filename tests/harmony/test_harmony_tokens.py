"""Tokens of a batch of conversations, against the reference, one at a time."""

import numpy as np
from tokenmill.tasks.harmony.compose import compose
from tokenmill.tasks.harmony.converters import CONVERTERS
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.message import Policy, Source
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.harmony.semantics import Quality, in_parts
from tokenmill.tasks.harmony.shard import token_counts

from tests.harmony import rows
from tests.peers.harmony_tokens import encode


def every_conversation():
    """The messages of every good row."""
    for name, given in rows.GOOD.items():
        for record, split in given:
            found = CONVERTERS[name](record, split)
            yield (compose(found, Policy()) if isinstance(found, Source) else found).messages


def test_tokens_are_counted_as_the_reference_counts_them():
    conversations = list(every_conversation())
    texts = [render(messages) for messages in conversations]
    whole, completion = token_counts([in_parts(text, parse(text), Quality()) for text in texts])
    for messages, total, spoken in zip(conversations, whole, completion, strict=True):
        sizes = np.diff(encode(messages).offsets)
        by_assistant = [size for size, message in zip(sizes, messages, strict=True) if message.author == "assistant"]
        assert (total, spoken) == (sizes.sum(), sum(by_assistant))
        assert 0 < spoken < total


def test_empty_input_has_zero_tokens():
    assert [each.tolist() for each in token_counts([])] == [[], []]

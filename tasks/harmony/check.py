"""The self-check of Harmony as a chat template: its ids are the reference's, and its masks name what is trained on.

The conversations are those that Jinja templates have to pass, composed in Harmony. Beyond what is asked of a template
(the tokens written out are the text, those that are trained on are the characters that the policy names, the ids are
the tokenizer's own of the whole text), the ids have to be those of openai-harmony: a vocabulary that has the control
tokens of Harmony and other words between them is refused. About a second, and the outcome is remembered in the store.
"""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version

import numpy as np
from tokenmill.tasks.chat.check import refusals, remembered_check, text_encoder
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.probes import PROBES
from tokenmill.tasks.chat.sequences import Pieces
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .render import TAGS
from .sequences import CONTROLS
from .training import HarmonyRows
from .vocabulary import IDS, encoding


def require_tokens(vocabulary: Vocabulary) -> None:
    """Raises InputError unless a vocabulary has the control tokens of Harmony under their ids."""
    for token, number in CONTROLS.ids.items():
        found = vocabulary.controls.get(token)
        if found != number:
            has = "no such token" if found is None else f"the id {found} for it"
            raise InputError(
                f"chat_template=harmony: {token} is token {number} of Harmony, and the tokenizer has {has}; set "
                "tokenizer.model=o200k_harmony, or choose another chat_template"
            )


def checked(rows: HarmonyRows, vocabulary: Vocabulary, store: str) -> dict[str, str]:
    """The kinds of conversation that are refused, with the reason; what is known is kept in the store.

    Raises InputError, saying which conversation went wrong and how, when masks or ids cannot be trusted.
    """
    question = [
        "self-check", rows.template.digest, rows.template.variables, vocabulary.fingerprint,
        asdict(rows.renderer.policy), rows.renderer.splits_turns, rows.special, PROBES,
        *(version(library) for library in ("tokenmill", "openai-harmony", "tokenizers", "tiktoken")),
    ]  # fmt: skip
    return remembered_check(question, store, lambda: _refused(rows, vocabulary))


def _refused(rows: HarmonyRows, vocabulary: Vocabulary) -> dict[str, str]:
    def sequences_of(probe: Conversation) -> list[Pieces] | Rejected:
        found = rows.read({"messages": probe.messages, "tools": probe.tools})
        sequences = found if isinstance(found, Rejected) else rows.sequences(found)
        if not isinstance(sequences, Rejected):
            require_official(sequences, vocabulary)
        return sequences

    return refusals(sequences_of, CONTROLS, vocabulary)


def require_official(sequences: Sequence[Pieces], vocabulary: Vocabulary) -> None:
    """Raises InputError unless the ids of sequences are those that openai-harmony gives their text."""
    batch = Batch()
    for pieces in sequences:
        batch.add(pieces)
    ids = batch.encode(text_encoder(vocabulary, CONTROLS, "reference", "literal")).ids
    names = {number: tag for tag, number in IDS.items()}
    text = "".join(names[each.token] if each.text is None else each.text for pieces in sequences for each in pieces)
    expected = encoding().encode(text, allowed_special=TAGS, disallowed_special=())
    if not np.array_equal(ids, expected):
        raise InputError(
            "chat_template=harmony: the tokenizer gives Harmony text other ids than openai-harmony does; set "
            "tokenizer.model=o200k_harmony, or choose another chat_template"
        )

"""How each source's records are read: one file per source with one function, and here their names.

A new source is a file here and a line in `CONVERTERS`. Most differ only in what they know beside the messages, and
hand over what `chat_source` reads.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.turns import Composed, Source

from . import (
    agentic,
    harmony_text,
    instruction_following,
    math_proofs,
    math_v2,
    openai_messages,
    science,
)

Converter = Callable[[Mapping[str, Any], str], Source | Composed | Rejected]
"""Of a record and the name of its split: a conversation, one that is in Harmony already, or why there is none."""

ProofTask = Literal["proof", "formalize", "both"]

CONVERTERS: dict[str, Converter] = {
    "math_v2": math_v2.convert,
    "math_proofs": math_proofs.convert,
    "math_proofs_formalize": math_proofs.formalize,
    "science": science.convert,
    "agentic": agentic.convert,
    "instruction_following": instruction_following.convert,
    "openai_messages": openai_messages.convert,
    "harmony_text": harmony_text.convert,
}

PROOF_TASKS: dict[ProofTask, tuple[str, ...]] = {
    "proof": ("math_proofs",),
    "formalize": ("math_proofs_formalize",),
    "both": ("math_proofs", "math_proofs_formalize"),
}
"""The converters that proofs are read with, each in a pass of its own, so that every pass accounts for every row."""

NAMES = (
    ("harmony", "harmony_text"),
    ("math-proofs", "math_proofs"),
    ("nemotron-math", "math_v2"),
    ("nemotron-science", "science"),
    ("nemotron-agentic", "agentic"),
    ("instruction-following-chat", "instruction_following"),
)
"""What a repository's name holds, and its converter; the first that fits."""


def converter_for(path: str) -> str:
    """The name of the converter for a repository, or a path that leads through one; messages where none is known."""
    names = path.lower().rstrip("/").split("/")
    repository = next((name for name in reversed(names) if "nemotron" in name), names[-1])
    return next((converter for part, converter in NAMES if part in repository), "openai_messages")

"""Finding a chat template: by name, in the tokenizer, in a file, or written out.

A name that is none of these is an error with the nearest known one: a misspelt name must never be rendered as if it
were a template.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .conversation import Rejected
from .probes import PROBES
from .template import ChatTemplate

BUNDLED = Path(__file__).parents[2] / "blends" / "templates"

OTHERS = ("harmony", "tokenizer")
"""What can be chosen beside the bundled templates; the first is no Jinja, and has a room of its own."""

TOOLS_END, CALL_FORMAT, HEADER_END = "</tools>", "<function=", "<|im_end|>"
"""What surrounds the instructions for tool calls in a header of the nano3 kind, and what only these instructions show."""


def load_template(chosen: str, vocabulary: Vocabulary, variables: Mapping[str, Any]) -> ChatTemplate:
    """The template that `chosen` names: `tokenizer`, a bundled one, a file, or Jinja text.

    Raises InputError when there is none, or when it is no Jinja.
    """
    variables = {**_token_names(vocabulary), **variables}
    if chosen == "tokenizer":
        return ChatTemplate(_own_source(vocabulary), variables)
    if "{%" in chosen or "{{" in chosen:
        return ChatTemplate(chosen, variables)
    bundled = {path.stem: path for path in sorted(BUNDLED.glob("*.jinja"))}
    if chosen in bundled:
        return ChatTemplate(_read(bundled[chosen]), {**_own_instructions(vocabulary), **variables})
    path = Path(chosen).expanduser()
    if path.is_file():
        return ChatTemplate(_read(path), variables)
    known = [*bundled, *OTHERS]
    raise InputError(
        f"chat_template: {chosen!r} is no known template, no file, and no Jinja text; {nearest(chosen, known)}, "
        "or give the path of a .jinja file"
    )


def _token_names(vocabulary: Vocabulary) -> dict[str, str]:
    """`bos_token` and `eos_token`, by which templates call the tokens that a tokenizer has for the two."""
    names = {number: token for token, number in vocabulary.controls.items()}
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos}
    return {variable: names[number] for variable, number in ids.items() if number is not None and number in names}


def _own_source(vocabulary: Vocabulary) -> str:
    if vocabulary.chat_template is None:
        raise InputError(
            "chat_template: the tokenizer has none of its own (no chat_template.jinja, none in tokenizer_config.json); "
            "name one, for example chat_template=nano3, or give the path of a .jinja file"
        )
    return vocabulary.chat_template


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat_template: {path} cannot be read: {error}; give a UTF-8 text file") from error


def _own_instructions(vocabulary: Vocabulary) -> dict[str, str]:
    """The words in which the model itself was told how to call tools, where its own template is of the same kind."""
    if vocabulary.chat_template is None or CALL_FORMAT not in vocabulary.chat_template:
        return {}
    probe = PROBES["a tool call"]
    try:
        rendering = ChatTemplate(vocabulary.chat_template, {}).render(probe.messages[:1], probe.tools)
    except InputError:  # a template that is not used need not be one
        return {}
    if isinstance(rendering, Rejected):
        return {}
    _, found, behind = rendering.text.partition(TOOLS_END)
    instructions, ended, _ = behind.partition(HEADER_END)
    return {"tool_instructions": instructions} if found and ended and CALL_FORMAT in instructions else {}

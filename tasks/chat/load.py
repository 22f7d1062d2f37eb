"""Load a chat template: by name, from the tokenizer, from a file, or given as text. Any other name is an error that suggests
the nearest known name; it is never rendered as a template.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .conversation import Rejected
from .probes import PROBES
from .template import ChatTemplate, compiled

BUNDLED = Path(__file__).parents[2] / "blends" / "templates"

OTHERS = ("harmony", "tokenizer")
"""Choices beside the bundled templates; `harmony` is not Jinja and is handled by the package harmony."""

TOOLS_END, CALL_FORMAT, HEADER_END = "</tools>", "<function=", "<|im_end|>"
"""The delimiters of tool-call instructions in a header like nano3's, and text that only such instructions contain."""


def load_template(chosen: str, vocabulary: Vocabulary, variables: Mapping[str, Any]) -> ChatTemplate:
    """The template named by `chosen`: `tokenizer`, a bundled one, a file, or Jinja text. Raises InputError if there is
    none or it is not valid Jinja.
    """
    variables = {**_token_names(vocabulary), **variables}
    if chosen == "tokenizer":
        return compiled(_own_source(vocabulary), variables)
    if "{%" in chosen or "{{" in chosen:
        return compiled(chosen, variables)
    bundled = {path.stem: path for path in sorted(BUNDLED.glob("*.jinja"))}
    if chosen in bundled:
        return compiled(_read(bundled[chosen]), {**_own_instructions(vocabulary), **variables})
    path = Path(chosen).expanduser()
    if path.is_file():
        return compiled(_read(path), variables)
    known = [*bundled, *OTHERS]
    raise InputError(
        f"chat_template: {chosen!r} is not a known template, a file, or Jinja text; {nearest(chosen, known)}, "
        "or give the path of a .jinja file"
    )


def _token_names(vocabulary: Vocabulary) -> dict[str, str]:
    """`bos_token` and `eos_token`, as templates call the tokenizer's tokens."""
    names = {number: token for token, number in vocabulary.controls.items()}
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos}
    return {variable: names[number] for variable, number in ids.items() if number is not None and number in names}


def _own_source(vocabulary: Vocabulary) -> str:
    if vocabulary.chat_template is None:
        raise InputError(
            "chat_template: the tokenizer has no template (neither chat_template.jinja nor an entry in tokenizer_config.json); "
            "give the path of a .jinja file, or name the format that the model was trained with: nano3, lightning35 or harmony"
        )
    return vocabulary.chat_template


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"chat_template: {path} cannot be read: {error}; give a UTF-8 text file") from error


def _own_instructions(vocabulary: Vocabulary) -> dict[str, str]:
    """The tool-call instructions of the model's own template, if that is of the same kind."""
    if vocabulary.chat_template is None or CALL_FORMAT not in vocabulary.chat_template:
        return {}
    probe = PROBES["a tool call"]
    try:
        rendering = ChatTemplate(vocabulary.chat_template, {}).render(probe.messages[:1], probe.tools)
    except InputError:  # an unused template may be invalid
        return {}
    if isinstance(rendering, Rejected):
        return {}
    _, found, behind = rendering.text.partition(TOOLS_END)
    instructions, ended, _ = behind.partition(HEADER_END)
    return {"tool_instructions": instructions} if found and ended and CALL_FORMAT in instructions else {}

"""Load a chat template, and check that it and a tokenizer produce correct masks on synthetic conversations.

A template is chosen by name, from the tokenizer, from a file, or given as text. Any other name is an error that suggests the
nearest known name; it is never rendered as a template.

The self-check runs before a preparation. For every probe that the template accepts, the decoded tokens must equal the rendering,
the decoded trained tokens must equal the characters chosen by the policy, and the ids must be the tokenizer's own. A template
that masks everything fails here and not in training. The check takes seconds, because it loads the reference tokenizer,
so its result is cached.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.shards.progress import explained
from tokenmill.tasks.shards.store import remembered
from tokenmill.tasks.storage import join
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.exact import encoder_of
from tokenmill.tasks.tokenize.settings import Backend, SpecialTokens
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .controls import Controls
from .conversation import Conversation, Rejected
from .encoding import Batch, Segments
from .loss import LossPolicy, completions, ended
from .probes import PROBES, TemplateProfile, is_reply, profile_template, unwritten_by
from .sequences import Renderer, SplitTurns
from .template import ChatTemplate, compiled

BUNDLED = Path(__file__).parents[2] / "blends" / "templates"

OTHERS = ("harmony", "tokenizer")
"""Choices beside the bundled templates; `harmony` is not Jinja and is handled by the package harmony."""

TOOLS_END, CALL_FORMAT, HEADER_END = "</tools>", "<function=", "<|im_end|>"
"""The delimiters of tool-call instructions in a header like nano3's, and text that only such instructions contain."""


def load_template(chosen: str, vocabulary: Vocabulary, variables: Mapping[str, Any]) -> ChatTemplate:
    """Return the template named by `chosen`: `tokenizer`, a bundled one, a file, or Jinja text. Raises InputError if there is
    none or it is not valid Jinja.
    """
    names = {number: token for token, number in vocabulary.controls.items()}
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos}
    # A template may write bos_token and eos_token, which transformers passes from the tokenizer.
    own = {variable: names[number] for variable, number in ids.items() if number is not None and number in names}
    variables = {**own, **variables}
    if chosen == "tokenizer":
        if vocabulary.chat_template is None:
            raise InputError(
                "chat_template: the tokenizer doesn't include a template (neither chat_template.jinja nor an entry in "
                "tokenizer_config.json); give the path of a .jinja file, or name the format that the model was trained with: "
                "nano3, lightning35 or harmony"
            )
        return compiled(vocabulary.chat_template, variables)
    if "{%" in chosen or "{{" in chosen:
        return compiled(chosen, variables)
    # Names of formats before files: a folder may have a file called nano3.
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


REQUIRED = ("one turn", "several turns")  # probes that every template must accept
SequencesOf = Callable[[Conversation], "list[Segments] | Rejected"]  # how a format turns a probe into sequences


@dataclass(frozen=True, slots=True)
class Checked:
    """A renderer that passed the check, the conversations that it rejects with the reason, and warnings."""

    renderer: Renderer
    refused: dict[str, str]
    warnings: list[str]


def renderer_of(
    template: ChatTemplate, vocabulary: Vocabulary, policy: LossPolicy, split_turns: SplitTurns, special: SpecialTokens
) -> Renderer:
    """Return the unchecked renderer of a template for a vocabulary, from probes of the template."""
    return _probed(template, vocabulary, policy, split_turns, special)[0]


@lru_cache(maxsize=8)
def _probed(
    template: ChatTemplate, vocabulary: Vocabulary, policy: LossPolicy, split_turns: SplitTurns, special: SpecialTokens
) -> tuple[Renderer, TemplateProfile]:
    """Cached, because it takes 50 ms, and a plan and its shards may share a process."""
    found = profile_template(template, vocabulary.controls)
    splits, literal = split_turns == "auto" and found.strips_history, special != "allow"
    unwritten = unwritten_by(template)
    # `composes` is found out with the renderer itself: what it composes of parts has to equal rendered prefixes.
    renderer = Renderer(template, found.controls, found.openings, policy, literal, splits, False, unwritten)
    composing = replace(renderer, composes=True)
    composes = splits and all(composing.sequences(each) == renderer.sequences(each) for each in PROBES.values())
    return replace(renderer, composes=composes), found


def variant(
    renderer: Renderer,
    variables: Mapping[str, Any],
    vocabulary: Vocabulary,
    split_turns: SplitTurns,
    special: SpecialTokens,
) -> Renderer | Rejected:
    """Return a renderer for rows with their own variables, probed as any other; Rejected if its masks would be wrong."""
    template = renderer.template
    try:
        own = compiled(template.source, {**template.variables, **variables})
        found = renderer_of(own, vocabulary, renderer.policy, split_turns, special)
        _require_prompted(found)
    except InputError as error:
        return Rejected("template_error", f"with its chat_template_kwargs: {error}")
    return found


def checked_renderer(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    policy: LossPolicy,
    split_turns: SplitTurns,
    special: SpecialTokens,
    store: str,
) -> Checked:
    """Return the renderer of a template for a vocabulary, after its self-check, which is cached in the store.

    Raises InputError, with the conversation and the difference, if its masks are wrong.
    """
    renderer, found = _probed(template, vocabulary, policy, split_turns, special)
    question = [
        "self-check", template.digest, template.variables, vocabulary.fingerprint, asdict(policy), split_turns, special,
        PROBES, version("tokenmill"), version("jinja2"), version("tokenizers"),
    ]  # fmt: skip

    def check() -> dict[str, str]:
        _require_prompted(renderer)
        return refusals(renderer.sequences, found.controls, vocabulary)

    refused = remembered_check(question, store, check)
    spelled = "none of the template's markers is a control token of this tokenizer: they are encoded as plain text, "
    warning = f"{spelled}so markers spelled in the data cannot be distinguished from them"
    return Checked(renderer, refused, [] if found.controls.written.ids else [warning])


EXPLANATION = (
    "check chat template: rendering and masking test conversations, once for each template and tokenizer in a store"
)


def remembered_check(question: Sequence[Any], store: str, check: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return the conversations that a check rejects; read from the store if the same `question` was checked before."""
    # The key is all that the answer depends on, so a cached answer is never out of date.
    digest = hashlib.sha256(orjson.dumps(question, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
    return remembered(join(store, "gates", f"{digest}.json"), dict[str, str], explained(EXPLANATION)(check))


def refusals(sequences_of: SequencesOf, controls: Controls, vocabulary: Vocabulary) -> dict[str, str]:
    """Return the rejected probes with the reason. Raises InputError unless all others are correct."""
    guarded = vocabulary.guarding(frozenset(controls.ids))  # also for whole texts, so that one tokenizer is loaded
    refused: dict[str, str] = {}
    for name, probe in PROBES.items():
        sequences = sequences_of(probe)
        if not isinstance(sequences, Rejected):
            _require_right(name, sequences, controls, guarded)
        elif name in REQUIRED and not (
            sequences.reason == "template_error"  # some templates need tools
            and not isinstance(sequences_of(PROBES["one turn with tools"]), Rejected)
        ):
            raise InputError(
                f"chat_template: no loss mask for a conversation of {name}: {sequences.detail} ({sequences.reason}); "
                "fix the template, or choose a different template or loss policy"
            )
        else:
            refused[name] = f"{sequences.reason}: {sequences.detail}"
    return refused


def _require_prompted(renderer: Renderer) -> None:
    """Require that every answer begins where the template's own generation prompt ends, if its rendering continues that prompt.
    Templates with generation tags mark this position themselves.
    """
    for name, probe in PROBES.items():
        rendering = renderer.template.render(probe.messages, probe.tools)
        if isinstance(rendering, Rejected) or any(kind == "generated" for _, _, (_, kind) in rendering.spans):
            continue
        # A template whose next header ends an answer has no end after the last one.
        rendering = ended(rendering, probe.messages, renderer.openings, renderer.controls.written)
        trained = renderer.policy.trained(probe.messages)
        found = completions(rendering, probe.messages, trained, renderer.openings, renderer.controls.written)
        starts = {} if isinstance(found, Rejected) else {number: each.start for number, each in found.items()}
        for number, start in starts.items():
            prompted = renderer.template.render(probe.messages[:number], probe.tools, add_generation_prompt=True)
            if not is_reply(probe.messages, number) or isinstance(prompted, Rejected):
                continue
            # Text of the template before the answer, such as `<think>`, may be on either side; only blanks may be lost.
            end = len(prompted.text)
            if rendering.text.startswith(prompted.text) and (start < end or rendering.text[end:start].strip()):
                raise InputError(
                    f"chat_template: in a conversation of {name}, message {number + 1} would be trained on from character "
                    f"{start}, but the template's generation prompt ends at {end}; fix the template, or choose a different one"
                )


def text_encoder(vocabulary: Vocabulary, controls: Controls, backend: Backend, special: SpecialTokens) -> Encoder:
    """Return the encoder of text between control tokens; control tokens in the text are plain text unless `special` is
    `allow`.
    """
    literal = special != "allow"
    guarded = vocabulary.guarding(frozenset(controls.ids)) if literal else vocabulary
    return encoder_of(guarded, backend, literal=literal)


def _require_right(name: str, found: Sequence[Segments], controls: Controls, vocabulary: Vocabulary) -> None:
    """Require sequences whose tokens and trained tokens read as the template wrote them, with the tokenizer's own ids."""
    batch = Batch()
    for segments in found:
        batch.add(segments)
    sequences = batch.encode(text_encoder(vocabulary, controls, "reference", "literal"))
    names = {number: token for token, number in controls.ids.items()}
    for number, segments in enumerate(found):
        where = slice(int(sequences.offsets[number]), int(sequences.offsets[number + 1]))
        ids, trained = sequences.ids[where], sequences.trained[where]
        texts = [names[each.token] if each.text is None else each.text for each in segments]
        whole = "".join(texts)
        expected = {"the tokens": (vocabulary.decode(ids.tolist()), whole)}
        if not sequences.straddled[number]:  # else a token has characters of both kinds
            wanted = "".join(text for text, each in zip(texts, segments, strict=True) if each.trained)
            expected["the trained tokens"] = vocabulary.decode(ids[trained == 1].tolist()), wanted
        for what, (read, wrote) in expected.items():
            if read != wrote:
                raise InputError(
                    f"chat_template: in a conversation of {name}, {what} read {read!r}, but the template wrote {wrote!r}; "
                    "this tokenizer cannot be used with this template"
                )
        # A server encodes the whole, or the prompt and each completion.
        starts = [0, *(place for place, each in enumerate(segments) if each.breaks), len(texts)]
        apart = ["".join(texts[start:stop]) for start, stop in itertools.pairwise(starts)]
        reference = vocabulary.reference(False)
        encodings = (reference.encode(pa.array(each, pa.large_string())).ids for each in ([whole], apart))
        if not any(np.array_equal(ids, each) for each in encodings):
            raise InputError(
                f"chat_template: a conversation of {name} has other ids than the tokenizer gives the whole text; "
                "a tokenizer that adds a space before every text cannot be used with chat templates"
            )

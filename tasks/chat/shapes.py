"""The shapes of chat rows: the fields with the conversation, and the fields next to it.

A shape is a row of SHAPES. It names either a list of messages, or a question and its answer; the first shape whose fields have
a value is read. What may lie beside it is the same for all shapes: a system prompt, tools, and for pairs a history and
reasoning. Any other field of the table gives a row a meaning that its shape doesn't have: a second question or answer is
ambiguous, pictures and sound can't be read, and a mark of a bad answer excludes the row, so such rows are rejected by the
field's name. The rest is counted as not read (`Conversation.unread`), and so is any field whose name speaks of a conversation,
such as `deepseek_attempt` (`is_telling`).

Which fields a row has decides everything but the values, so this is worked out once for each set of fields.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from .conversation import Reason, RejectionError
from .json_values import kind, listed, parsed

Record = Mapping[str, Any]

Given = tuple[tuple[str, str], ...]
"""The fields that a blend names, as pairs of a part (`prompt`, `response`, `system`, `history`, `tools`) and a field."""


def given_of(fields: Mapping[str, str]) -> Given:
    """Return the fields that a blend names, by part."""
    return tuple(fields.items())


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the messages of a row are: a list in `messages`, or a pair, `prompt` and `response`. All are fields.

    `more` follow the prompt, each on a new line, if they have a value; for ids they are masks. `same` repeat fields that are read. `beside`
    are other fields by which the shape is known. `prompt_trained` is false where answers in the prompt's messages aren't trained on.
    """

    name: str
    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    more: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    prompt_trained: bool = True

    @property
    def needed(self) -> list[str]:
        return [name for name in (self.messages, self.prompt, self.response, *self.beside) if name is not None]


HISTORY = "history"

XLAM = "xLAM calls"  # the shape whose answers are calls
TOKENIZED = "pre-tokenized rows"  # the shape whose rows hold ids in place of messages (see `tokenized`)

MASKS = ("labels", "loss_mask", "assistant_masks", "completion_mask")
"""Fields of such rows that select the ids to train on."""

ATIF_TOOLS = "agent.tool_definitions"

REFERENCES = ("answer", "expected_answer", "final_answer", "ground_truth_solution")
"""Fields with the result that a solution arrives at."""

QUESTIONS = (
    "prompt", "query", "problem", "question", "instruction", "input", "inputs", "user", "human", "user_prompt", "user_query",
    "user_message", "user_input", "input_text", "text_input", "source_text", "message_1", "q",
)  # fmt: skip
SOLUTIONS = ("generated_solution", "deepseek_solution", "llm_response", "generation", "solution")
ANSWERS = (
    *SOLUTIONS, "response", "output", "completion", "answer", "targets", "target", "assistant", "bot", "gpt", "chatgpt",
    "assistant_response", "assistant_message", "model_response", "model_output", "output_text", "target_text", "demonstration",
    "message_2", "a",
)  # fmt: skip
"""What questions and their answers are called. The first of each that a row has are read."""


def _pair(prompt: str, response: str) -> "Shape":
    """The shape of a question and an answer; beside a solution, the result that it arrives at repeats a part of it."""
    given = response in SOLUTIONS or (prompt, response) == ("problem", "response")
    same = tuple(name for name in REFERENCES if given and name != response)
    return Shape(f"{prompt} and {response}", prompt=prompt, response=response, more=("context",), same=same)


SHAPES = (
    Shape("messages", "messages"),
    Shape("turns", "conversations"),
    Shape("turns", "conversation"),
    Shape("SWE-agent trajectory", HISTORY, beside=("trajectory",)),
    Shape("trajectory", "trajectory"),
    Shape("ATIF trajectory", "steps", beside=("agent",)),
    Shape("ADP trajectory", "content", beside=("details",)),
    Shape("UltraChat texts", "data"),
    Shape("dialogue", "dialogue"),
    Shape("dialogue", "dialog"),
    Shape(XLAM, prompt="query", response="answers"),
    Shape("Alpaca pairs", prompt="instruction", response="output", more=("input", "context")),
    Shape("Dolly pairs", prompt="instruction", response="response", more=("input", "context")),
    Shape("instruction and answer", prompt="instruction", response="answer", more=("input", "context")),
    Shape("instruction and completion", prompt="instruction", response="completion", more=("input", "context")),
    Shape("prompt and completion", prompt="prompt", response="completion", prompt_trained=False),
    Shape(
        "input and output", prompt="input", response="output", more=("context",), same=("solution", "expected_answer")
    ),
    *itertools.starmap(_pair, itertools.product(QUESTIONS, ANSWERS)),
    Shape("input and content", prompt="input", response="content"),
    Shape("source and target", prompt="source", response="target"),
    Shape("turns", "items"),
    Shape("OpenHands events", HISTORY),
    *(Shape(TOKENIZED, "input_ids", more=(*MASKS, "attention_mask", "seq_start_id"), beside=(mask,)) for mask in MASKS),
    Shape(TOKENIZED, "prompt_ids", beside=("prompt_mask", "completion_ids", "completion_mask")),
)
"""All shapes, in the order in which they are tried."""

Meaning = Literal["ambiguous", "media", "verdict", "other", "telling"]

KWARGS = "chat_template_kwargs"
"""The field of a row's own variables for the template, as TRL and Megatron-Bridge call it."""

SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction", "systemprompt", "preamble")
TOOLS = ("tools", "functions", "available_tools")
REASONING = (
    "reasoning", "reasoning_content", "thinking", "thought", "complex_cot", "cot", "chain_of_thought", "rationale",
    "deepseek_reasoning",
)  # fmt: skip
SWITCHES = frozenset({"on", "off"})  # values of `reasoning` that are a switch of the data's generator, not a text

METADATA = frozenset({
    "source", "target", "user", "human", "bot", "gpt", "chatgpt", "assistant", "agent", "details", "data", "items", "content",
    "message_1", "message_2", "q", "a", "labels", "attention_mask", "seq_start_id",
})  # fmt: skip
"""Shape fields that are usually meaningless in rows with other shapes."""

BESIDE: Mapping[str, Meaning] = {
    **dict.fromkeys([name for name in (*QUESTIONS, *ANSWERS) if name not in METADATA], "ambiguous"), "definition": "ambiguous",
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), "media"),
    "label": "verdict",
    **dict.fromkeys(
        (
            "chosen", "rejected", "response_format", "documents", "objects", "speakers", "narrative", "input_ids", "loss_mask",
            *REFERENCES, *REASONING,
        ),
        "other",
    ),
}  # fmt: skip
"""The meaning of a field that a shape doesn't read: a second question or answer, pictures and sound, a mark of the answer, or
something else, as any other field of the table does. A field that is only `telling` means something if it isn't a mere number.
"""

KNOWN = dict.fromkeys([*(name for shape in SHAPES for name in (*shape.needed, *shape.more)), *SYSTEMS, *TOOLS, *BESIDE])
"""All fields with a meaning, in lower case."""

TELLING = (
    "answers?|assistant|attempts?|chat|chosen|completions?|context|conversations?|cot|critiques?|definition|demonstrations?|dialog|"
    "dialogs|dialogues?|explanations?|functions?|generations?|history|inputs?|instructions?|messages?|outputs?|problem|prompts?|query|"
    "questions?|rationales?|reasoning|rejected|replies|reply|responses?|solutions?|system|targets?|think|thinking|thoughts?|tools?|"
    "traces?|trajectory|trajectories|turns?|user|weights"
)
FACTS = (
    "answered|assessment|category|characters|chars|class|config|correct|correctness|count|counts|created|date|difficulty|domain|error|"
    "format|from|hash|id|identifier|idx|ids|index|info|is|judgement|judgment|kind|labels?|lang|languages?|len|lengths?|level|license|"
    "logprobs|meta|metadata|models?|moderation|n|names?|num|number|origin|pass|quality|rank|rate|ratings?|rewards?|scores?|sources?|"
    "statistics|stats|status|style|subset|tags?|task|time|timestamp|tokens?|topic|types?|url|uuid|verified|version"
)
"""Words in field names: some suggest a conversation, others a fact about one."""


def _word(words: str) -> str:
    return rf"(?:(?<![a-zA-Z])|(?<=[a-z])(?=[A-Z]))(?i:{words})(?:(?![a-zA-Z])|(?<=[a-z])(?=[A-Z]))"


ANY_TELLING = rf"(?!.*{_word(FACTS)}).*{_word(TELLING)}.*"
"""Field names that suggest a conversation, such as `r1_solution` and `userPrompt`, as a regular expression."""


def is_telling(name: str) -> bool:
    """Return whether a name is one of ANY_TELLING."""
    return re.fullmatch(ANY_TELLING, name) is not None


def fields_read(messages_field: str | None, tools_field: str, given: Given = ()) -> list[str]:
    """Return the fields of a record that are looked at, dotted if nested; the last one is a pattern (see `parquet_batches.named`)."""
    own = [] if messages_field is None else [messages_field]
    # Telling names can't be listed; columns of Parquet are chosen by this pattern.
    pattern = f"/(?i:{'|'.join(KNOWN)})|{ANY_TELLING}/"
    return list(dict.fromkeys([*own, *(name for _, name in given), tools_field, KWARGS, *KNOWN, pattern]))


class Layout(NamedTuple):
    """A shape for rows with the same fields: with their spelling, and with the fields next to it, in the order of the row;
    `optional` are the fields named by the blend that a row may lack.

    `messages` and the other fields of `shape` may be dotted if the blend names them.
    """

    shape: Shape
    systems: tuple[str, ...]
    tools: tuple[str, ...]
    history: str | None
    reasoning: tuple[str, ...]
    others: Sequence[tuple[str, Meaning]]
    optional: Given


def value_at(record: Record, path: str, reason: Reason) -> Any:  # noqa: ANN401 - JSON may be anything
    """Return the value at a dotted path, which may lead through JSON text; None if it or a parent is absent or null.

    Raises RejectionError for a parent that is neither an object nor the JSON text of one.
    """
    # A field may have a dot in its name.
    if path in record:
        return record[path]
    value: object = record
    for key in path.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parsed(value, reason, f"{path} (inside a string)")
        if value is None or value == "":
            return None
        if not isinstance(value, Mapping):
            raise RejectionError(reason, f"the path {path} needs an object at {key}, but finds {kind(value)}")
        value = value.get(key)
    return value


def layout_of(record: Record, messages_field: str | None, tools_field: str, given: Given) -> Layout:
    """Return the layout of a row. Raises RejectionError (no_messages) if its shape is unknown."""
    # In Parquet, every row has all fields; those with a value make the shape.
    keys = tuple([key for key, value in record.items() if value is not None])
    found = _layout(keys, messages_field, tools_field, given)
    if found is not None:
        return found
    values = f"the fields with a value: {listed(keys)}"
    if {"chosen", "rejected"} <= set(keys):
        raise RejectionError("no_messages", f"it is a preference, prepared by tokenmill rl; {values}")
    raise RejectionError(
        "no_messages",
        f"its shape isn't known; {values}; name in the blend the list of messages "
        '("messages_field": "…"), or question and answer ("fields": {"prompt": "…", "response": "…"})',
    )


@lru_cache(maxsize=4096)
def _layout(keys: tuple[str, ...], messages_field: str | None, tools_field: str, given: Given) -> Layout | None:
    names: dict[str, str] = {}
    telling: list[str] = []
    for key in keys:
        lower = key.lower()
        # Of two spellings of a name, lower case counts.
        if lower in KNOWN and (lower not in names or key == lower):
            names[lower] = key
        elif is_telling(key):
            telling.append(key)
    parts = dict(given)
    named = None if messages_field is None else Shape("messages", messages_field)
    if named is None and "prompt" in parts:
        named = Shape("fields of the blend", prompt=parts["prompt"], response=parts["response"])
    shape = named or next((each for each in SHAPES if all(name in names for name in each.needed)), None)
    if shape is None:
        return None
    if named is None:  # the fields are spelled as in the row, and of `more` those remain that it has
        more = tuple(names[each] for each in shape.more if each in names)
        needed = {part: names[name] for part in ("messages", "prompt", "response") if (name := getattr(shape, part))}
        shape = replace(shape, more=more, **needed)
    used = {*shape.needed, *shape.more, tools_field, *parts.values()}
    # Only a pair can have a history and reasoning beside it; messages have theirs inside.
    is_pair = shape.messages is None
    systems = (parts["system"],) if "system" in parts else tuple(names[each] for each in SYSTEMS if each in names)
    named_tools = parts.get("tools") or (tools_field if tools_field != TOOLS[0] else None)
    tools = (named_tools,) if named_tools else tuple(names[each] for each in TOOLS if each in names)
    if "agent" in shape.beside and not named_tools:
        tools += (ATIF_TOOLS,)
    history = parts.get("history") or (names.get(HISTORY) if is_pair else None)
    reasoning = tuple(names[each] for each in REASONING if each in names) if is_pair else ()
    read = {*used, *systems, *tools, *reasoning, history}
    same = {names[each] for each in shape.same if each in names}
    clear = named is not None or not is_pair
    others: list[tuple[str, Meaning]] = []
    for lower, key in names.items():
        if key not in read and (lower in BESIDE or lower not in METADATA):
            meaning = BESIDE.get(lower, "other")
            others.append((key, "other" if meaning == "ambiguous" and (clear or key in same) else meaning))
    beside = {*(each.split(".")[0] for each in read if each), KWARGS}
    others.extend((key, "telling") for key in telling if key not in beside)
    optional = tuple((f"fields.{part}", path) for part, path in given if part not in {"prompt", "response"})
    optional += (("tools_field", tools_field),) if tools_field != TOOLS[0] else ()
    return Layout(shape, systems, tools, history, reasoning, tuple(others), optional)


def shape_name(record: Record, messages_field: str | None = None, given: Given = ()) -> str | None:
    """Return the name of a row's shape, such as `Alpaca pairs`; None if its shape is unknown."""
    found = _layout(tuple(key for key, value in record.items() if value is not None), messages_field, TOOLS[0], given)
    return None if found is None else found.shape.name

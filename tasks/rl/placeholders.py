"""Resolve rows that refer to a question in a different dataset.

Such a row has a `_hf_placeholder`, `{"row": …, "question_template": …}`, and its `dataset` names the table that holds the
question (`tables`). The placeholder is removed, `question` and `expected_answer` are added, and the prompt becomes the `input`
of `responses_create_params`; all other fields are kept. A row without a placeholder, or with a null one, is returned as is.

The table's style sets how a template is applied. `dapo`: the question is placed between an instruction and a reminder, one
paragraph each; the template's prefix and suffix (`{"prefix": …, "suffix": …}`) replace them. A blank line separates them from
the question, and also precedes a question without a prefix. `skywork`: the question replaces `{question}` in the template,
which is text or `{"template": text}`; a template without the marker gives only the question.

A row of Nemotron 3 Ultra or 3.5 Lightning has a `_hf_question_placeholder` instead, `{"dataset": …, "split": …, "row": …}`; the
first two, joined by a slash, name the table. The question is stripped, and in a `dapo` table without the
instruction and the reminder, between `lead` and `trail` if `mode` is `canonical`, else between `prefix` and `suffix`. It becomes
`question` and the content of the first message in `input`; the answer, always a text, becomes `expected_answer`, also where
`matched_sources` repeat it. So it is in the program that NVIDIA-NeMo/Nemotron prepares these rows with
(`steps/data_prep/rl_prep`).

In a `_hf_placeholder`, if an answer is the text of a JSON list or object, its first value is used; any other answer is stripped, because graders
compare texts. Prompt and answer follow the script published with Nemotron 3's rows, blank lines included:
https://huggingface.co/datasets/nvidia/Nemotron-RL-Super-Training-Blends (`fill_placeholders.py`). 3 to 4 µs a row.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from tokenmill.tasks.chat.conversation import RejectionError, rejecting
from tokenmill.tasks.chat.json_values import kind, listed, quoted
from tokenmill.tasks.errors import nearest
from tokenmill.tasks.sources.exact_json import compact, loads

from .rows import PARAMS, PLACEHOLDER, QUESTION_PLACEHOLDER, Record, Transform, is_null, placeholder_of
from .tables import LookupTable

QUESTIONS = 32_768
"""Tables repeat questions, so this many are kept without instruction and reminder."""

MARKER = "{question}"
TEMPLATE = f"{PLACEHOLDER}.question_template"
PARAGRAPH = "\n\n"
WRAPPED_PARAGRAPHS = 3
"""With fewer paragraphs a question can't be between two others."""
DAPO_INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_REMINDER = 'Remember to put your answer on its own line after "Answer:".'
"""What DAPO-Math-17k writes before and after each question."""


def resolve_placeholders(tables: Mapping[str, Callable[[], LookupTable]]) -> Transform:
    """Return a transform that resolves placeholders with `tables`, by the value of `dataset`; each is called when first needed."""
    loaded: dict[str, LookupTable] = {}

    def table(name: object) -> LookupTable:
        if not isinstance(name, str) or name not in tables:
            tip = nearest(name if isinstance(name, str) else "", tables)
            remedy = "give resolve_placeholders a table with that name, or exclude such rows with a filter"
            raise RejectionError(
                "unknown_placeholder_table", f"dataset is {quoted(name)}, which isn't a table; {tip}; {remedy}"
            )
        # Loading takes seconds, and a shard may hold no row that needs the table.
        if name not in loaded:
            loaded[name] = tables[name]()
        return loaded[name]

    @rejecting
    def resolve(record: Record) -> Record:
        field = placeholder_of(record)
        if field is None:
            return record
        if field == QUESTION_PLACEHOLDER:
            return _with_question(record, table)
        return _resolved(record, table(record.get("dataset")))

    return resolve


def _resolved(record: Record, table: LookupTable) -> Record:
    """A copy of the row with its question."""
    placeholder = record[PLACEHOLDER]
    if not isinstance(placeholder, dict):
        raise _malformed(PLACEHOLDER, placeholder, "an object with row and question_template")
    placeholder = cast("dict[str, Any]", placeholder)
    question, text = _row(PLACEHOLDER, placeholder.get("row"), table)
    answer = _answer(text)
    # A grader can't judge without an answer, and every attempt would fail.
    if answer in (None, "", [], {}):
        raise _empty("placeholder_without_answer", placeholder["row"], "answer")
    asked = (_dapo if table.style == "dapo" else _skywork)(question, placeholder.get("question_template"))
    resolved = dict(record)
    del resolved[PLACEHOLDER]
    resolved["question"] = asked if table.style == "dapo" else question
    resolved["expected_answer"] = answer
    resolved[PARAMS] = {**_params(record), "input": [{"role": "user", "content": asked}]}
    return resolved


def _with_question(record: Record, table: Callable[[object], LookupTable]) -> Record:
    """A copy of the row with its question and answer, in every place that has one."""
    placeholder = record[QUESTION_PLACEHOLDER]
    if not isinstance(placeholder, dict):
        raise _malformed(QUESTION_PLACEHOLDER, placeholder, "an object with dataset, split and row")
    placeholder = cast("dict[str, Any]", placeholder)
    held = table(f"{placeholder.get('dataset')}/{placeholder.get('split')}")
    number = placeholder.get("row")
    # Some published rows write the number as text.
    number = int(number) if isinstance(number, str) and number.strip().isdecimal() else number
    question, text = _row(QUESTION_PLACEHOLDER, number, held)
    # The placeholder has its own texts around the question, so those that DAPO wrote into it go.
    if held.style == "dapo":
        question = question.partition(DAPO_INSTRUCTION)[2] if DAPO_INSTRUCTION in question else question
        question = question.rpartition(DAPO_REMINDER)[0] if DAPO_REMINDER in question else question
    names = ("lead", "trail") if placeholder.get("mode") == "canonical" else ("prefix", "suffix")
    before, after = (_text(placeholder, name, QUESTION_PLACEHOLDER) or "" for name in names)
    asked, answer = f"{before}{question.strip()}{after}", _answer_text(text)
    if not asked.strip() or not answer:
        empty = "answer" if asked.strip() else "question"
        raise _empty(f"placeholder_without_{empty}", number, empty)
    resolved = dict(record, question=asked, expected_answer=answer)
    del resolved[QUESTION_PLACEHOLDER]
    params = _params(record)
    # Rows of other environments ask nothing, or a text; only a first message is made the question.
    items = cast("list[Any]", params.get("input")) if isinstance(params.get("input"), list) else []
    if items and isinstance(items[0], dict):
        resolved[PARAMS] = {**params, "input": [{**items[0], "content": asked}, *items[1:]]}
    if isinstance(record.get("matched_sources"), list):
        resolved["matched_sources"] = [
            {**source, "expected_answer": answer}
            if isinstance(source, dict) and "expected_answer" in source
            else source
            for source in record["matched_sources"]
        ]
    return resolved


def _answer_text(text: str) -> str:
    """Return the first value of a JSON list, other JSON values as Python writes them, or the stripped text."""
    text = text.strip()
    if (text[:1], text[-1:]) not in {("[", "]"), ("{", "}")}:
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return str(cast("list[object]", value)[0] if isinstance(value, list) and value else value)


def _row(field: str, number: object, table: LookupTable) -> tuple[str, str]:
    """Question and answer of a row in the table."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise _malformed(f"{field}.row", number, "the number of a row of the table")
    found = table.row(number)
    if found is None:
        raise RejectionError(
            "placeholder_out_of_range",
            f"{field}.row is {number}, and the table has {len(table)} rows, numbered from 0; "
            "take the table, and the revision of it, that the row was made with",
        )
    # A table may have nulls; no row refers to one unless it was made with a different file.
    question, text = found
    if question is None:
        raise _empty("placeholder_without_question", number, "question")
    if text is None:
        raise _empty("placeholder_without_answer", number, "answer")
    return question, text


def _malformed(field: str, value: object, wanted: str) -> RejectionError:
    return RejectionError("malformed_placeholder", f"{field} is {kind(value)}; make it {wanted}")


def _empty(reason: str, number: object, what: str) -> RejectionError:
    remedy = "take the table that the row was made with, or leave the row out"
    return RejectionError(reason, f"row {number} of the table has no {what}; {remedy}")


def _answer(text: str) -> Any:  # noqa: ANN401 - JSON may be anything
    """The first value of a JSON list or object, or the stripped text."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return text
    try:
        value = loads(text)
        compact(value)  # repeated keys and other values that can't be written again leave the answer a text
    except (TypeError, ValueError):
        return text
    values = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else value
    return values[0] if values else None


def _dapo(question: str, template: object) -> str:
    """The question between the template's prefix and suffix, without its own instruction and reminder."""
    if template is None:
        return question
    if not isinstance(template, dict):
        raise _malformed(TEMPLATE, template, "an object with prefix or suffix")
    template = cast("dict[str, Any]", template)
    prefix, suffix = _text(template, "prefix", TEMPLATE), _text(template, "suffix", TEMPLATE)
    # A template with neither is probably one for a different style.
    if prefix is suffix is None:
        _require_empty(template, "prefix or suffix")
    # The template's own texts replace the instruction and the reminder, which are the first and the last paragraph.
    inner = _unwrapped(question)
    if not prefix and not suffix:
        return inner
    before = f"{prefix or ''}{PARAGRAPH}"
    return f"{before}{inner}{PARAGRAPH}{suffix}" if suffix else f"{before}{inner}"


@lru_cache(maxsize=QUESTIONS)
def _unwrapped(question: str) -> str:
    """The question without instruction and reminder."""
    paragraphs = question.split(PARAGRAPH)
    return PARAGRAPH.join(paragraphs[1:-1]) if len(paragraphs) >= WRAPPED_PARAGRAPHS else question


def _skywork(question: str, template: object) -> str:
    """The template with the question in place of the marker."""
    text = template
    if isinstance(template, dict):
        template = cast("dict[str, Any]", template)
        text = _text(template, "template", TEMPLATE)
        if text is None:
            _require_empty(template, "template")
    if text is not None and not isinstance(text, str):
        raise _malformed(TEMPLATE, text, f"a text with {MARKER}")
    return text.replace(MARKER, question) if text and MARKER in text else question


def _text(template: Mapping[str, Any], name: str, field: str) -> str | None:
    value = template.get(name)
    if value is not None and not isinstance(value, str):
        raise _malformed(f"{field}.{name}", value, "text")
    return value


def _require_empty(template: Mapping[str, Any], wanted: str) -> None:
    """Raises RejectionError for a template that has other keys instead of the `wanted` ones."""
    if not is_null(template):
        detail = f"{TEMPLATE} has {listed(template)} instead of {wanted}"
        raise RejectionError("malformed_placeholder", f"{detail}; check the style of the table")


def _params(record: Record) -> dict[str, Any]:
    """The parameters of the request in the row."""
    params = record.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        raise RejectionError("bad_request_params", f"{PARAMS} is {kind(params)}; make it an object, or remove it")
    return cast("dict[str, Any]", params or {})
